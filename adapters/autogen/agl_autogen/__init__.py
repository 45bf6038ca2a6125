"""agl's adapter for AutoGen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_autogen.plugin import attach
    from agl_autogen.recording import Recorded, record

__all__ = ["Recorded", "attach", "record"]

__getattr__ = lazily(__name__, Recorded=".recording", attach=".plugin", record=".recording")
