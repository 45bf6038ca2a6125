"""agl's adapter for AutoGen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_autogen.alone import record as record

__getattr__ = lazily(__name__, record=".alone")
