"""agl's adapter for the OpenAI Agents SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_openai_agents.plugin import attach
    from agl_openai_agents.processor import AglProcessor

__all__ = ["AglProcessor", "attach"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every agl process, also where nobody uses the SDK: its import waits for a use.
    if name == "AglProcessor":
        from agl_openai_agents.processor import AglProcessor

        return AglProcessor
    if name == "attach":
        from agl_openai_agents.plugin import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
