"""The trace processor, one line in an agent that you have; used alone, each trace is an episode."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from agents.tracing import Span, Trace, TracingProcessor

import agl_core
from agl_core.apis.alone import LocalRollout, LocalRollouts
from agl_core.capture import (
    BoundedDict,
    Identity,
    IdentityScope,
    current_attempt,
    current_identity,
    describe_error,
    enter_identity,
    guarded,
)
from agl_openai_agents.plugin import openai_agents


@dataclass(frozen=True, slots=True, eq=False)
class _OpenTrace:
    rollout: LocalRollout
    scope: IdentityScope
    around: BaseException | None
    """An error that was being handled when the trace began: it is not the agent's crash."""


class AglProcessor(LocalRollouts, TracingProcessor):
    """Add it to the trace processors of an agent that you already have:

        agents.add_trace_processor(AglProcessor())

    In a rollout, it reports who makes each call and what the tools did. Outside any rollout, with no server and any
    endpoint, it keeps the latest `keep` traces; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        super().__init__(keep)
        self._open: BoundedDict[str, _OpenTrace] = BoundedDict()
        agl_core.attach([openai_agents])

    @guarded
    def on_trace_start(self, trace: Trace) -> None:
        if current_attempt() is None:
            rollout = self.begin(trace.trace_id, trace.export())
            scope = enter_identity(current_identity() or Identity(), attempt=rollout.attempt)
            self._open[trace.trace_id] = _OpenTrace(rollout, scope, sys.exc_info()[1])

    @guarded
    def on_trace_end(self, trace: Trace) -> None:
        ended = self._open.pop(trace.trace_id, None)
        if ended is not None:
            ended.scope.close()
            error = sys.exc_info()[1]
            ended.rollout.finish(error=describe_error(error) if error and error is not ended.around else None)

    def on_span_start(self, span: Span[Any]) -> None:
        """Do nothing: calls and tools are seen where they run."""

    def on_span_end(self, span: Span[Any]) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing: nothing has to be closed."""

    def force_flush(self) -> None:
        """Do nothing: nothing is sent anywhere."""
