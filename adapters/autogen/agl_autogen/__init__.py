"""agl's adapter for AutoGen."""

from agl_autogen.plugin import Recorded, attach, record

__all__ = ["Recorded", "attach", "record"]
