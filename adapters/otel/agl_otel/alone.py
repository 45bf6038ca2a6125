"""Spans as data when there is no gateway to record the calls: text, and token ids where a span holds the raw reply."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.capture import CapturedRollout
from agl_core.capture.spans import messages
from agl_core.capture.spans.spans import ModelCall, Span, see
from agl_core.capture.spans.tree import SpanTree
from agl_core.learning import build_episode
from agl_core.types import Call, Episode, Identity, Transition
from agl_otel.sdk import plain

_MAX_RUNNING = 20_000
"""A span may never end; the oldest running ones are forgotten beyond this many."""


def episodes(spans: Iterable[ReadableSpan]) -> list[Episode]:
    """The agent's runs in ended spans (an `InMemorySpanExporter`'s, say): one for each root that has LLM calls."""
    found = [plain(span) for span in spans]
    outer = {(span.trace, span.id): span for span in found}
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in found:
        root, seen = span, {span.id}
        while (above := outer.get((root.trace, root.parent or ""))) is not None and above.id not in seen:
            root = above
            seen.add(root.id)
        groups.setdefault((root.trace, root.id), []).append(span)
    return [episode_of(group) for group in groups.values() if any(map(_is_call, group))]


def transitions(spans: Iterable[ReadableSpan]) -> list[Transition]:
    """The transitions of all episodes in ended spans.

    >>> transitions([])
    []
    """
    return [transition for episode in episodes(spans) for transition in episode.transitions]


def episode_of(spans: Sequence[Span]) -> Episode:
    """The spans below one root, and the root, as an episode."""
    by_key = {(span.trace, span.id): span for span in spans}
    root = next((span for span in spans if (span.trace, span.parent or "") not in by_key), spans[0])
    tree = SpanTree(see(span) for span in spans)
    rollout = CapturedRollout(f"otel:{root.trace}:{root.id}", messages.input_of(root))
    calls = tree.calls()
    ids = Counter(call.response_id for call in calls)
    for call in calls:
        seen = [by_key[span.key] for span in call.spans]
        id = call.response_id if ids[call.response_id] == 1 else None
        rollout.call(_call(id, call.identity, seen, rollout.id, rollout.next_sequence()))
    for report in tree.tool_results():
        rollout.recording.tool_result(report)
    rollout.finish(messages.output_of(root), (root.description or "error") if root.failed else None)
    return build_episode(*rollout.records())


@dataclass(slots=True, eq=False)
class _Trace:
    root: tuple[str, str]
    spans: list[Span] = field(default_factory=list)
    """Those that have ended."""
    has_ended: bool = False
    has_calls: bool = False


class Traces:
    """The latest `keep` traces with LLM calls whose root has ended in this process."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], _Trace] = {}
        self._ended: dict[tuple[str, str], _Trace] = {}

    def start(self, span: Span) -> None:
        """A span started; it is a root if the one around it is not running here."""
        key = span.trace, span.id
        with self._lock:
            self._running[key] = self._running.get((span.trace, span.parent or "")) or _Trace(key)
            if len(self._running) > _MAX_RUNNING:
                del self._running[next(iter(self._running))]

    def end(self, span: Span) -> None:
        """A span ended."""
        key = span.trace, span.id
        with self._lock:
            trace = self._running.pop(key, None)
            if trace is None:
                return
            trace.spans.append(span)
            trace.has_ended |= key == trace.root
            trace.has_calls |= _is_call(span)
            if trace.has_ended and trace.has_calls:
                self._ended[trace.root] = trace
                while len(self._ended) > self._keep:
                    del self._ended[next(iter(self._ended))]

    def ended(self) -> list[list[Span]]:
        """The spans of each trace, in the order in which their roots ended."""
        with self._lock:
            return [list(trace.spans) for trace in self._ended.values()]

    def clear(self) -> None:
        """Forget what has ended."""
        with self._lock:
            self._ended.clear()


def _is_call(span: Span) -> bool:
    return isinstance(see(span).did, ModelCall)


def _call(id: str | None, identity: Identity, spans: Sequence[Span], rollout: str, sequence: int) -> Call:
    request = messages.request_of(spans)
    sampling = messages.sampling_of(request)
    outermost = spans[0]
    return Call(
        id=id or f"otel:{outermost.trace}:{outermost.id}",
        rollout=rollout,
        attempt=0,
        sequence=sequence,
        policy=str(request.get("model") or "unknown"),
        version=None,
        request=request,
        choices=messages.choices_of(spans),
        started=outermost.started or 0.0,
        ended=outermost.ended or 0.0,
        agent=identity.agent,
        parent_span=identity.parent_span,
        prompt_ids=messages.prompt_ids_of(spans),
        requested=sampling,
        effective=sampling,
    )
