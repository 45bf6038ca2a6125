"""The span processor that a user adds to a tracer provider."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span

from agl_core.capture import guarded
from agl_core.learning.alone import Alone
from agl_otel.alone import Traces
from agl_otel.plugin import attach
from agl_otel.sdk import plain
from agl_otel.watching import WatchingProcessor


class AglSpanProcessor(WatchingProcessor, Alone):
    """Add it to the tracer provider that you already have:

        provider.add_span_processor(AglSpanProcessor())

    In a rollout it says who makes each call and what the tools did; to put that on the calls' requests, it attaches
    agl to this process. Outside any rollout, with no server and any endpoint, it keeps the latest `keep` traces that
    have LLM calls; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        WatchingProcessor.__init__(self)
        self._traces = Traces(keep)
        Alone.__init__(self, self._traces)
        attach()

    @guarded
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if not self.running.start(span, trace.get_current_span(parent_context)):
            self._traces.start(plain(span))

    @guarded
    def on_end(self, span: ReadableSpan) -> None:
        self.running.end(span)
        self._traces.end(plain(span))
