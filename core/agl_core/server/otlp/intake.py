"""What the spans of an attempt add to its record: tool results, and the agents of calls without a name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from agl_core.capture.spans import SeenCall, Span, SpanTree, see
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Call, Identity, Source, ToolResult
from agl_core.wire.workers import ToolResultReport

logger = logging.getLogger(__name__)

_MAX_SPANS = 10_000
"""Of one attempt."""
_LATE = (
    "Spans came after their attempt had ended, and do not count. Exporters send in batches, every 5 seconds by "
    "default: flush before the agent returns (provider.force_flush()), or set OTEL_BSP_SCHEDULE_DELAY=100. "
    "Further ones are only counted."
)


@dataclass(slots=True)
class IntakeCounters:
    """What the intake counted since its start."""

    spans: int = 0
    """Spans taken in."""
    late: int = 0
    """Spans that came after their attempt was closed, and do not count."""
    rejected: int = 0
    """Spans that could not be taken in."""
    tool_results: int = 0
    """Tool results recorded."""
    named_calls: int = 0
    """Recorded calls that got their agent or their parent span from a span."""


@dataclass(slots=True, eq=False)
class _Trace:
    """The spans of one open attempt, and what was recorded because of them."""

    attempt: ActiveAttempt
    tree: SpanTree = field(default_factory=SpanTree)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tool_results: dict[str, ToolResultReport] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    """By response id."""

    def add(self, spans: Iterable[Span]) -> tuple[list[ToolResultReport], list[SeenCall]]:
        """What is to be recorded because of these spans: tool results that are new or changed, and calls."""
        for span in spans:
            self.tree.add(see(span))
        tool_results = [each for each in self.tree.tool_results() if self.tool_results.get(each.id) != each]
        return tool_results, [each for each in self.tree.calls() if _tells(each, self.identities)]


class SpanIntake:
    """Records the content of spans. They come in batches, inner ones before those around them; each may come twice.

    The first that comes with its ids counts, and what it says of a tool stays: spans around it only add what was left
    open. What an adapter in the agent's process sent as a header stays. All methods belong to one event loop.
    """

    def __init__(self, store: Store) -> None:
        self.counters = IntakeCounters()
        self._store = store
        self._traces: dict[AttemptKey, _Trace] = {}

    async def take(self, attempt: ActiveAttempt, spans: Sequence[Span]) -> str | None:
        """Record spans of an attempt; why they were not taken in, if they were not. StoreError if it fails."""
        self._forget_closed()
        if attempt.closed:
            if not self.counters.late:
                logger.warning(_LATE)
            self.counters.late += len(spans)
            return f"attempt {attempt.record.attempt} of rollout {attempt.record.rollout} is closed: they do not count"
        trace = self._traces.setdefault(attempt.key, _Trace(attempt))
        if len(trace.tree) + len(spans) > _MAX_SPANS:
            self.counters.rejected += len(spans)
            return (
                f"attempt {attempt.record.attempt} of rollout {attempt.record.rollout} has {_MAX_SPANS} spans already"
            )
        self.counters.spans += len(spans)
        # The attempt's end waits for what came in before it, also where the exporter hangs up.
        task = asyncio.create_task(self._record(attempt.key, trace, spans))
        attempt.committing.add(task)
        task.add_done_callback(attempt.committing.discard)
        await asyncio.shield(task)
        return None

    async def _record(self, key: AttemptKey, trace: _Trace, spans: Sequence[Span]) -> None:
        async with trace.lock:
            reports, calls = await asyncio.to_thread(trace.add, spans)
            tool_results = [
                ToolResult(rollout=key.rollout, attempt=key.attempt, **{**each.model_dump(), "source": Source.SPAN})
                for each in reports
            ]
            named = await self._named(key, calls, trace.identities)
            if tool_results or named:
                await trace.attempt.keep_spans(self._store, *tool_results, *named)
            self.counters.tool_results += sum(each.id not in trace.tool_results for each in reports)
            self.counters.named_calls += len(named)
            trace.tool_results.update({each.id: each for each in reports})
            trace.identities.update({each.response_id: each.identity for each in calls if each.response_id})

    async def _named(self, key: AttemptKey, seen: Iterable[SeenCall], before: dict[str, Identity]) -> list[Call]:
        """The recorded calls that these spans add to, with what they add."""
        wanted = {each.response_id: each.identity for each in seen}
        if not wanted:
            return []
        changed = []
        for call in await self._store.calls([key]):
            if call.id in wanted:
                new, earlier = wanted[call.id], before.get(call.id, Identity())
                agent = new.agent if call.agent in (None, earlier.agent) else call.agent
                parent = new.parent_span if call.parent_span in (None, earlier.parent_span) else call.parent_span
                if (agent, parent) != (call.agent, call.parent_span):
                    changed.append(replace(call, agent=agent, parent_span=parent))
        return changed

    def _forget_closed(self) -> None:
        self._traces = {key: each for key, each in self._traces.items() if not each.attempt.closed}


def _tells(call: SeenCall, before: dict[str, Identity]) -> bool:
    """Whether a call's spans name an agent or a parent span that they did not name before."""
    identity = call.identity
    is_new = call.response_id is not None and before.get(call.response_id) != identity
    return is_new and (identity.agent is not None or identity.parent_span is not None)
