"""agl's adapter for LangChain and LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_langchain.callback import AglCallback, attach

__all__ = ["AglCallback", "attach"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every agl process, also where nobody uses LangChain: its import waits for a use.
    if name in __all__:
        from agl_langchain import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
