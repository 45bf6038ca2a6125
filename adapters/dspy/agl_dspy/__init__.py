"""agl's adapter for DSPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_dspy.plugin import attach

__all__ = ["attach"]

__getattr__ = lazily(__name__, attach=".plugin")
