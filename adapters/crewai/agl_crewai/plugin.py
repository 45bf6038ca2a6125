"""The adapter that this package registers."""

from __future__ import annotations

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "crewai",
        "`Error executing task with agent 'look'. Error: …`, `I encountered an error: …`, `Error executing tool: …`, "
        "`Error executing tool. …`, `Tool not found`",
        ToolStatus.ERROR,
        begins(r"""
            (?: Error\ executing\ task\ with\ agent\ '[^'\n]{1,200}'\.\ Error
              | Error\ executing\ tool
              | I\ encountered\ an\ error (?: \ while\ trying\ to\ use\ the\ tool\.\ This\ was\ the\ error )? )
            :\s (?P<error> [^\n]* )
          | Error\ executing\ tool\.\s
          | Tool\ not\ found\Z
        """),
        "crewai 1.15.30",
    ),
)


@agl_core.adapter("crewai", status_rules=_RULES)
def crewai() -> None:
    """CrewAI: the roles of agents, and tool results."""
    from agl_crewai import events

    events.follow()
