"""agl's adapter for LangChain and LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_langchain.callback import AglCallback
    from agl_langchain.plugin import attach

__all__ = ["AglCallback", "attach"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every agl process, also where nobody uses LangChain: its import waits for a use.
    if name == "AglCallback":
        from agl_langchain.callback import AglCallback

        return AglCallback
    if name == "attach":
        from agl_langchain.plugin import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
