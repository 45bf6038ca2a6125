"""Frameworks that have OpenTelemetry of their own: agl-otel reads their spans, and has no code for any of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from agl_core.testing.adapters.driver import Driver


class Traced(Driver):
    """The process has a tracer provider, which is the framework's documented way to be traced."""

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        with _provider(), super().attached(form):
            yield


@contextlib.contextmanager
def _provider() -> Iterator[None]:
    """A process has one provider for its whole life: what watches it is taken out at the end."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from agl_otel.watching import watch

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        trace.set_tracer_provider(provider)
    processors, make = provider._active_span_processor._span_processors, TracerProvider.__init__
    try:
        yield
    finally:
        provider._active_span_processor._span_processors = processors
        TracerProvider.__init__ = make  # type: ignore[method-assign]
        watch.cache_clear()
