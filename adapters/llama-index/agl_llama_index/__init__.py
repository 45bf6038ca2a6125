"""agl's adapter for LlamaIndex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_llama_index.plugin import attach
    from agl_llama_index.spans import AglSpanHandler

__all__ = ["AglSpanHandler", "attach"]

__getattr__ = lazily(__name__, AglSpanHandler=".spans", attach=".plugin")
