"""The adapter that this package registers; what the tools did, Haystack's conversations show."""

from __future__ import annotations

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus

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


@agl_core.adapter("haystack.tracing.tracer", name="haystack", status_rules=_RULES)
def haystack() -> None:
    """Haystack: the names of components in pipelines, and of agents that are tools."""
    from agl_haystack.spans import watch

    watch()
