"""agl's adapter for LangChain and LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_langchain.callback import AglCallback as AglCallback

__getattr__ = lazily(__name__, AglCallback=".callback")
