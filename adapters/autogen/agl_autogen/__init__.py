"""agl's adapter for AutoGen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_autogen.plugin import attach
    from agl_autogen.recording import Recorded, record

__all__ = ["Recorded", "attach", "record"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every agl process, also where nobody uses AutoGen: its import waits for a use.
    if name == "attach":
        from agl_autogen.plugin import attach

        return attach
    if name in __all__:
        from agl_autogen import recording

        return getattr(recording, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
