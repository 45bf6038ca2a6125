"""agl's adapter for AutoGen."""

from agl_autogen.plugin import Recorded, record

__all__ = ["Recorded", "record"]
