"""agl's adapter for CrewAI, by its events: who makes a call, and what the tools did.

The event bus runs its listeners in threads of its own, sometimes after the agent has gone on. So events are seen where
they are emitted: there the agent's own context can be given its name before it sends a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import agl_core
from agl_core.capture import AgentRun, StatusRule, ToolRun, begins, failure_status, status_of, watch
from agl_core.capture.marking import open_runs
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


@agl_core.adapter("crewai", status_rules=_RULES)
def crewai() -> None:
    """CrewAI: the roles of agents, and tool results."""
    from crewai.events import crewai_event_bus

    watch(type(crewai_event_bus), "emit", _see)


def _role_of_task(source: Any, event: Any) -> str | None:
    """Its agent also makes the calls before and after its own work: for memory, or to make JSON of its answer."""
    agent = getattr(getattr(event, "task", None) or source, "agent", None)
    return None if agent is None else str(agent.role)


_TOOL = "tool_usage"
_ROLES: Mapping[str, Callable[[Any, Any], str | None]] = {
    "agent_execution": lambda source, event: event.agent.role,
    "lite_agent_execution": lambda source, event: event.agent_info["role"],
    "task": _role_of_task,
}
"""The role of the agent that begins to work, by what precedes "_started" in the type of the event."""


def _see(_: Any, source: Any, event: Any, *__: Any, **___: Any) -> None:
    kind, _, stage = event.type.rpartition("_")
    if stage == "started" and kind == _TOOL:
        ToolRun(event.tool_name, None, event.tool_args or {}, adapter="crewai", of=kind).start()
    elif stage == "started" and kind in _ROLES:
        role = _ROLES[kind](source, event)
        if role is not None:
            AgentRun(role.strip(), "crewai", of=kind).start()
    elif stage in ("completed", "finished", "error", "failed"):
        _end(kind, event)


def _end(kind: str, event: Any) -> None:
    """The innermost run of this kind has ended; what was left open inside it was cut off."""
    opened = [*open_runs("crewai")]
    kinds = [run.of for run in opened]
    if kind not in kinds:
        return
    *cut_off, run = opened[: kinds.index(kind) + 1]
    for inner in cut_off:
        if isinstance(inner, ToolRun):
            inner.only_failures = True
        inner.end(None)
    error = None
    if isinstance(run, ToolRun) and event.type.endswith("finished"):
        failure = getattr(event, "failure", None)
        run.result = event.output
        run.decided = failure_status(failure.message) if failure else status_of(event.output)
    elif isinstance(run, ToolRun):
        error = event.error if isinstance(event.error, BaseException) else RuntimeError(event.error)
    run.end(error)
