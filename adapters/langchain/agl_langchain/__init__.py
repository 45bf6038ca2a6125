"""agl's adapter for LangChain and LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.plugins import lazily
from agl_core.types import ToolStatus

if TYPE_CHECKING:
    from agl_langchain.callback import AglCallback as AglCallback

__getattr__ = lazily(__name__, "langchain_core", AglCallback=".callback")

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
