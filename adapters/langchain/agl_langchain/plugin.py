"""The adapter that this package registers."""

from __future__ import annotations

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "langgraph",
        ToolStatus.ERROR,
        begins(r"(?s: Error\ (?:executing|invoking)\ tool\b (?: .*?\ with\ error:\s (?P<error>.*) )? )"),
    ),
)


@agl_core.adapter("langchain_core", status_rules=_RULES)
def langchain() -> None:
    """LangChain and LangGraph: agent and node names, and tool results."""
    from agl_langchain.callback import attach

    attach()
