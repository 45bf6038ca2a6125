"""agl's adapter for agents that speak OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_otel.processor import AglSpanProcessor as AglSpanProcessor

__getattr__ = lazily(__name__, AglSpanProcessor=".processor")
