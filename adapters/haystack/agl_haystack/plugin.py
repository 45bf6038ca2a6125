"""What this package registers: an adapter for Haystack, and one for its agents, which are imported later."""

from __future__ import annotations

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus


@agl_core.adapter("haystack.tracing.tracer")
def haystack() -> None:
    """Haystack: the names of components in pipelines, and of agents that are tools."""
    from agl_haystack.watching import watch_spans

    watch_spans()


_RULES = (
    StatusRule(
        "haystack",
        "``Failed to invoke Tool `look` with parameters {}. Error: no city``, "
        "`Tool 'look' not found. Available tools: …`",
        ToolStatus.ERROR,
        begins(
            r"(?s: Failed\ to\ invoke\ Tool\ `[^`\n]{1,200}`\ with\ parameters\b (?: .*?\.\ Error:\s (?P<error>.*) )? )"
            r"| Tool\ '[^'\n]{1,200}'\ not\ found\.\ Available\ tools:"
        ),
        "haystack-ai 3.4.0",
    ),
)


@agl_core.adapter("haystack.components.agents.tool_calling", name="haystack-agents", status_rules=_RULES)
def haystack_agents() -> None:
    """Haystack's agents: tool results."""
    from agl_haystack.watching import watch_tools

    watch_tools()


def attach() -> None:
    """See every Haystack pipeline and agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([haystack, haystack_agents])
