"""agl's adapter for LlamaIndex."""

from __future__ import annotations

import agl_core
from agl_core.capture import StatusRule, begins
from agl_core.types import ToolStatus

_RULES = (
    StatusRule(
        "llama-index",
        ToolStatus.ERROR,
        begins(r"Tool\ \S{1,200}\ not\ found\.\ Please\ select\ a\ tool\ that\ is\ available\."),
    ),
)


@agl_core.adapter("llama_index.core", name="llama-index", status_rules=_RULES)
def llama_index() -> None:
    """LlamaIndex: the names of agents and of workflows, and tool results."""
    from agl_llama_index.spans import attach

    attach()
