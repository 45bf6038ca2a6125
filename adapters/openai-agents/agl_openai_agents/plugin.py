"""The adapter that this package registers."""

from __future__ import annotations

import sys
from collections.abc import Callable

import agl_core
from agl_core.capture import Identity, StatusRule, begins
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "openai-agents",
        ToolStatus.ERROR,
        begins(r"An\ error\ occurred\ while\ running\ the\ tool | Tool\ '[^'\n]{1,200}'\ not\ found\.\Z"),
    ),
    StatusRule(
        "openai-agents-timeout",
        ToolStatus.TIMEOUT,
        begins(r"Tool\ '[^'\n]{1,200}'\ timed\ out\ after\ [\d.e+-]+\ seconds\."),
    ),
)


@agl_core.adapter("agents", name="openai-agents", status_rules=_RULES)
def openai_agents() -> Callable[[], Identity | None] | None:
    """OpenAI Agents SDK: agent and guardrail names, and tool results."""
    if not hasattr(sys.modules.get("agents"), "add_trace_processor"):
        return None  # a module of the user's that has the same name

    from agl_openai_agents import runs

    runs.attach()
    return runs.who_calls
