"""agl's adapter for agents that speak OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_otel.plugin import attach
    from agl_otel.processor import AglSpanProcessor, episodes, transitions

__all__ = ["AglSpanProcessor", "attach", "episodes", "transitions"]

__getattr__ = lazily(
    __name__, AglSpanProcessor=".processor", attach=".plugin", episodes=".processor", transitions=".processor"
)
