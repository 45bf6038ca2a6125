"""CrewAI's events: who makes a call, and what the tools did.

The event bus runs its listeners in threads of its own, sometimes after the agent has gone on. So events are seen where
they are emitted: there the agent's own context can be given its name before it sends a request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from crewai.events import crewai_event_bus

from agl_core.capture import ToolRun, current_attempt, failure_status, guarded, status_of
from agl_core.capture.marking import AgentRun
from agl_core.capture.wrapping import wrap_once

_Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """An agent, a task or a tool that has started in this context."""

    kind: str
    run: AgentRun | ToolRun


_open: ContextVar[tuple[_Open, ...]] = ContextVar("agl_crewai_open", default=())
"""The innermost last."""


def follow() -> None:
    """Follow the events of every agent and crew; calling it again changes nothing."""
    wrap_once(type(crewai_event_bus), "emit", _seeing)


def _seeing(emit: _Function) -> _Function:
    def emit_seen(bus: Any, source: Any, event: Any, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is not None:
            _see(source, event)
        return emit(bus, source, event, *args, **kwargs)

    return emit_seen


@guarded
def _see(source: Any, event: Any) -> None:
    handle = _HANDLERS.get(event.type)
    if handle is not None:
        handle(source, event)


def _agent_started(_: Any, event: Any) -> None:
    _start("agent", AgentRun(_name_of(event.agent.role)))


def _lite_agent_started(_: Any, event: Any) -> None:
    _start("agent", AgentRun(_name_of(event.agent_info["role"])))


def _agent_ended(_: Any, event: Any) -> None:
    _end("agent")


def _task_started(source: Any, event: Any) -> None:
    """Its agent also makes the calls before and after its own work: for memory, or to make JSON of its answer."""
    agent = getattr(getattr(event, "task", None) or source, "agent", None)
    if agent is not None:
        _start("task", AgentRun(_name_of(agent.role)))


def _task_ended(_: Any, event: Any) -> None:
    _end("task")


def _tool_started(_: Any, event: Any) -> None:
    _start("tool", ToolRun(event.tool_name, None, event.tool_args or {}, adapter="crewai"))


def _tool_finished(_: Any, event: Any) -> None:
    run, failure = _taken("tool"), getattr(event, "failure", None)
    if isinstance(run, ToolRun):
        run.result = event.output
        run.decided = failure_status(failure.message) if failure else status_of(event.output)
        run.end(None)


def _tool_failed(_: Any, event: Any) -> None:
    run, error = _taken("tool"), event.error
    if isinstance(run, ToolRun):
        run.end(error if isinstance(error, BaseException) else RuntimeError(error))


def _name_of(role: str) -> str:
    return role.strip()


def _start(kind: str, run: AgentRun | ToolRun) -> None:
    run.start(dict)
    _open.set((*_open.get(), _Open(kind, run)))


def _end(kind: str) -> None:
    run = _taken(kind)
    if run is not None:
        run.end(None)


def _taken(kind: str) -> AgentRun | ToolRun | None:
    """The innermost one of this kind; what was left open inside it was cut off."""
    opened = list(_open.get())
    if not any(entry.kind == kind for entry in opened):
        return None
    while (innermost := opened.pop()).kind != kind:
        if isinstance(innermost.run, ToolRun):
            innermost.run.only_failures = True
        innermost.run.end(None)
    _open.set(tuple(opened))
    return innermost.run


_HANDLERS: dict[str, Callable[[Any, Any], None]] = {
    "agent_execution_started": _agent_started,
    "agent_execution_completed": _agent_ended,
    "agent_execution_error": _agent_ended,
    "lite_agent_execution_started": _lite_agent_started,
    "lite_agent_execution_completed": _agent_ended,
    "lite_agent_execution_error": _agent_ended,
    "task_started": _task_started,
    "task_completed": _task_ended,
    "task_failed": _task_ended,
    "tool_usage_started": _tool_started,
    "tool_usage_finished": _tool_finished,
    "tool_usage_error": _tool_failed,
}
