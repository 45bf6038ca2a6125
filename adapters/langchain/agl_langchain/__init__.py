"""agl's adapter for LangChain and LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_langchain.callback import AglCallback
    from agl_langchain.plugin import attach

__all__ = ["AglCallback", "attach"]

__getattr__ = lazily(__name__, AglCallback=".callback", attach=".plugin")
