"""The trace processor: one line in an agent that you have."""

from __future__ import annotations

import sys
from typing import Any

from agents.tracing import GenerationSpanData, ResponseSpanData, Span, Trace, TracingProcessor

from agl_core.capture import Capture, CapturedRollout, current_attempt, describe_error, guarded
from agl_core.types import Episode, Transition
from agl_openai_agents.plugin import attach
from agl_openai_agents.records import call_of
from agl_openai_agents.tools import keep_tool_results

_MAX_OPEN_TRACES = 20_000
"""A trace that is abandoned is never said to have ended; the oldest are forgotten beyond this many."""


class AglProcessor(TracingProcessor):
    """Add it to the trace processors of an agent that you already have:

        agents.add_trace_processor(AglProcessor())

    In a rollout, agl is told who makes each call and what the tools did. Outside any rollout, with no server and any
    endpoint, it keeps the latest `keep` traces; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._alone = Capture(keep)
        self._open: dict[str, tuple[CapturedRollout, BaseException | None]] = {}
        self._sequences: dict[str, int] = {}
        attach()

    def episodes(self) -> list[Episode]:
        """The traces that have ended, in the order they started.

        Text; and token ids where the endpoint returned them and the SDK kept them (Responses API).
        """
        from agl_core.learning import build_episode

        return [build_episode(*rollout.records()) for rollout in self._alone.finished()]

    def transitions(self) -> list[Transition]:
        """The transitions of all episodes."""
        return [transition for episode in self.episodes() for transition in episode.transitions]

    def clear(self) -> None:
        """Forget what was kept."""
        self._alone.clear()

    @guarded
    def on_trace_start(self, trace: Trace) -> None:
        if current_attempt():
            return  # the gateway records the calls
        rollout = self._alone.start(trace.trace_id, trace.export())
        # An agent may be run where another error is being handled; that one is no crash of it.
        self._open[trace.trace_id] = rollout, sys.exc_info()[1]
        keep_tool_results(rollout)
        if len(self._open) > _MAX_OPEN_TRACES:
            del self._open[next(iter(self._open))]

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
            rollout, _ = self._open[span.trace_id]
            call = call_of(span, rollout.id, sequence)
            if call:
                rollout.call(call)

    def shutdown(self) -> None:
        """Nothing is open that has to be closed."""

    def force_flush(self) -> None:
        """Nothing is sent anywhere."""
