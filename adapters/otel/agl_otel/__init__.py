"""agl's adapter for agents that speak OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_otel.alone import episodes, transitions
    from agl_otel.plugin import attach
    from agl_otel.processor import AglSpanProcessor

__all__ = ["AglSpanProcessor", "attach", "episodes", "transitions"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every agl process, also where nobody uses OpenTelemetry: its import waits for a use.
    if name == "AglSpanProcessor":
        from agl_otel.processor import AglSpanProcessor

        return AglSpanProcessor
    if name == "attach":
        from agl_otel.plugin import attach

        return attach
    if name in __all__:
        from agl_otel import alone

        return getattr(alone, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
