"""agl's adapter for CrewAI, by its events: who makes a call, and what the tools did.

The event bus runs its listeners in threads of its own, sometimes after the agent has gone on. So events are seen where
they are emitted: there the agent's own context can be given its name before it sends a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import agl_core
from agl_core.capture import StatusRule, ToolRun, begins, current_attempt, failure_status, guarded, status_of
from agl_core.capture.marking import AgentRun
from agl_core.capture.reports import wrap_once
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "crewai",
        ToolStatus.ERROR,
        begins(r"""
            (?: Error\ executing\ task\ with\ agent\ '[^'\n]{1,200}'\.\ Error
              | Error\ executing\ tool
              | I\ encountered\ an\ error (?: \ while\ trying\ to\ use\ the\ tool\.\ This\ was\ the\ error )? )
            :\s (?P<error> [^\n]* )
          | Error\ executing\ tool\.\s
          | Tool\ not\ found\Z
        """),
    ),
)

_Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """An agent, a task or a tool that has started in this context."""

    kind: str
    run: AgentRun | ToolRun


_open: ContextVar[tuple[_Open, ...]] = ContextVar("agl_crewai_open", default=())
"""The innermost last."""


@agl_core.adapter("crewai", status_rules=_RULES)
def crewai() -> None:
    """CrewAI: the roles of agents, and tool results."""
    from crewai.events import crewai_event_bus

    wrap_once(type(crewai_event_bus), "emit", _seeing)


def _seeing(emit: _Function) -> _Function:
    def emit_seen(bus: Any, source: Any, event: Any, *args: Any, **kwargs: Any) -> Any:
        if current_attempt() is not None:
            _see(source, event)
        return emit(bus, source, event, *args, **kwargs)

    return emit_seen


def _role_of_task(source: Any, event: Any) -> str | None:
    """Its agent also makes the calls before and after its own work: for memory, or to make JSON of its answer."""
    agent = getattr(getattr(event, "task", None) or source, "agent", None)
    return None if agent is None else str(agent.role)


_ROLES: Mapping[str, Callable[[Any, Any], str | None]] = {
    "agent_execution": lambda source, event: event.agent.role,
    "lite_agent_execution": lambda source, event: event.agent_info["role"],
    "task": _role_of_task,
}
"""The role of the agent that begins to work, by what precedes "_started" in the type of the event."""


@guarded
def _see(source: Any, event: Any) -> None:
    kind, _, stage = event.type.rpartition("_")
    if kind == "tool_usage":
        _see_tool(stage, event)
    elif kind in _ROLES and stage == "started":
        role = _ROLES[kind](source, event)
        if role is not None:
            _start(kind, AgentRun(role.strip()))
    elif kind in _ROLES and stage in ("completed", "error", "failed") and (run := _taken(kind)) is not None:
        run.end(None)


def _see_tool(stage: str, event: Any) -> None:
    if stage == "started":
        _start("tool_usage", ToolRun(event.tool_name, None, event.tool_args or {}, adapter="crewai"))
    elif stage in ("finished", "error") and isinstance(run := _taken("tool_usage"), ToolRun):
        if stage == "finished":
            failure = getattr(event, "failure", None)
            run.result = event.output
            run.decided = failure_status(failure.message) if failure else status_of(event.output)
            run.end(None)
        else:
            error = event.error
            run.end(error if isinstance(error, BaseException) else RuntimeError(error))


def _start(kind: str, run: AgentRun | ToolRun) -> None:
    run.start(dict)
    _open.set((*_open.get(), _Open(kind, run)))


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
