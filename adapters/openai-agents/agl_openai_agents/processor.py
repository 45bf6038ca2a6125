"""The trace processor: one line in an agent that you have."""

from __future__ import annotations

import sys
from typing import Any

from agents.tracing import GenerationSpanData, ResponseSpanData, Span, Trace, TracingProcessor

from agl_core.capture import Capture, CapturedRollout, Latest, current_attempt, describe_error, guarded
from agl_core.learning.alone import Alone
from agl_openai_agents.plugin import attach
from agl_openai_agents.records import keep_call
from agl_openai_agents.tools import keep_tool_results


class AglProcessor(Alone, TracingProcessor):
    """Add it to the trace processors of an agent that you already have:

        agents.add_trace_processor(AglProcessor())

    In a rollout, it reports who makes each call and what the tools did. Outside any rollout, with no server and any
    endpoint, it keeps the latest `keep` traces; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._capture = Capture(keep)
        super().__init__(self._capture)
        self._open: Latest[str, tuple[CapturedRollout, BaseException | None]] = Latest()
        self._sequences: Latest[str, int] = Latest()
        attach()

    @guarded
    def on_trace_start(self, trace: Trace) -> None:
        if current_attempt():
            return  # the gateway records the calls
        rollout = self._capture.start(trace.trace_id, trace.export())
        # An agent may run while another error is handled; that error is not its crash.
        self._open[trace.trace_id] = rollout, sys.exc_info()[1]
        keep_tool_results(rollout)

    @guarded
    def on_trace_end(self, trace: Trace) -> None:
        if trace.trace_id in self._open:
            rollout, before = self._open.pop(trace.trace_id)
            error = sys.exc_info()[1]
            rollout.finish(error=describe_error(error) if error and error is not before else None)

    @guarded
    def on_span_start(self, span: Span[Any]) -> None:
        if span.trace_id in self._open and isinstance(span.span_data, GenerationSpanData | ResponseSpanData):
            self._sequences[span.span_id] = self._open[span.trace_id][0].next_sequence()

    @guarded
    def on_span_end(self, span: Span[Any]) -> None:
        sequence = self._sequences.pop(span.span_id, None)
        if sequence is not None and span.trace_id in self._open:
            keep_call(self._open[span.trace_id][0], span, sequence)

    def shutdown(self) -> None:
        """Do nothing: nothing has to be closed."""

    def force_flush(self) -> None:
        """Do nothing: nothing is sent anywhere."""
