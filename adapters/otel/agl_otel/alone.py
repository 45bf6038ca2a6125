"""Spans as data without a gateway that records the calls: text, and token ids if a span holds the raw reply."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.capture import CapturedRollout, Latest
from agl_core.capture.spans import messages
from agl_core.capture.spans.spans import ModelCall, Span, see
from agl_core.capture.spans.tree import SpanTree
from agl_core.learning import build_episode
from agl_core.types import Episode, Transition
from agl_otel.sdk import plain


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
    captured = [captured_of(group) for group in groups.values() if any(map(_is_call, group))]
    return [build_episode(*rollout.records()) for rollout in captured]


def transitions(spans: Iterable[ReadableSpan]) -> list[Transition]:
    """The transitions of all episodes in ended spans.

    >>> transitions([])
    []
    """
    return [transition for episode in episodes(spans) for transition in episode.transitions]


def captured_of(spans: Sequence[Span]) -> CapturedRollout:
    """The spans below one root, and the root, as a rollout."""
    by_key = {(span.trace, span.id): span for span in spans}
    root = next((span for span in spans if (span.trace, span.parent or "") not in by_key), spans[0])
    tree = SpanTree(see(span) for span in spans)
    rollout = CapturedRollout(f"otel:{root.trace}:{root.id}", messages.input_of(root))
    calls = tree.calls()
    ids = Counter(call.response_id for call in calls)
    for call in calls:
        seen = [by_key[span.key] for span in call.spans]
        outermost = seen[0]
        rollout.call(
            call.response_id
            if call.response_id and ids[call.response_id] == 1
            else f"otel:{outermost.trace}:{outermost.id}",
            messages.request_of(seen),
            messages.choices_of(seen),
            sequence=rollout.next_sequence(),
            who=call.identity,
            started=outermost.started or 0.0,
            ended=outermost.ended or 0.0,
            prompt_ids=messages.prompt_ids_of(seen),
        )
    for report in tree.tool_results():
        rollout.recording.tool_result(report)
    rollout.finish(messages.output_of(root), (root.description or "error") if root.failed else None)
    return rollout


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
        self._lock = threading.Lock()
        self._running: Latest[tuple[str, str], _Trace] = Latest()
        self._ended: Latest[tuple[str, str], _Trace] = Latest(keep)

    def start(self, span: Span) -> None:
        """A span started; it is a root if the one around it is not running here."""
        key = span.trace, span.id
        with self._lock:
            self._running[key] = self._running.get((span.trace, span.parent or "")) or _Trace(key)

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

    def finished(self) -> list[CapturedRollout]:
        """The traces that have ended, in the order in which their roots did."""
        with self._lock:
            ended = [list(trace.spans) for trace in self._ended.values()]
        return [captured_of(spans) for spans in ended]

    def clear(self) -> None:
        """Forget what has ended."""
        with self._lock:
            self._ended.clear()


def _is_call(span: Span) -> bool:
    return isinstance(see(span).did, ModelCall)
