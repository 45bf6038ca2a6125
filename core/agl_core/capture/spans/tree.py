"""Who made each call, and what the tools did, from all spans of an agent: by parentage and ids, never by time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agl_core.capture.spans.spans import ModelCall, SeenSpan, ToolExecution
from agl_core.types import Identity, ToolStatus
from agl_core.wire.workers import ToolResultReport

SPANS = "otel"
"""The `adapter` of tool results from spans."""
_MAX_DEPTH = 1000


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One LLM invocation, which several instrumentations may have seen."""

    response_id: str | None
    identity: Identity
    spans: tuple[SeenSpan, ...]
    """Its spans, the outermost first."""


def agent_of(lineage: Iterable[SeenSpan]) -> str | None:
    """The nearest agent in a span and those around it (innermost first); without any, the nearest graph node."""
    node = None
    for span in lineage:
        if span.agent is not None:
            return span.agent
        node = node or span.node
    return node


def identity_of(lineage: Sequence[SeenSpan]) -> Identity:
    """Who makes a call inside these spans (innermost first), with the nearest span around it that is not a call."""
    calls = [span for span in lineage if isinstance(span.did, ModelCall)]
    around = next((span for span in lineage if not isinstance(span.did, ModelCall)), None)
    # The outermost call's parent may not be known here (another process has it), but the call says its id.
    parent = around.id if around else calls[-1].parent if calls else None
    return Identity(agent_of(lineage), span=calls[0].id if calls else None, parent_span=parent)


def outermost_execution(lineage: Iterable[SeenSpan]) -> SeenSpan:
    """Of a tool's span and those around it, the outermost that is the same run of the tool.

    Two instrumentations may each have a span for it: with the same tool, and with ids that agree or are missing.
    """
    spans = iter(lineage)
    outermost = next(spans)
    for span in spans:
        if span.is_agent:
            break  # an agent that a tool runs may well run a tool of that name
        if isinstance(span.did, ToolExecution):
            if not _is_same(outermost.did, span.did):
                break
            outermost = span
    return outermost


def tool_result_of(spans: Sequence[SeenSpan], agent: str | None) -> ToolResultReport:
    """The tool result of one run of a tool, from the spans that saw it: the outermost first, the innermost last.

    Its id is that of the span that ended first, so that it stays the same when spans around it come in later.
    """
    outermost = spans[0]
    first = min(spans, key=lambda span: span.ended or 0.0)
    seen = [span.did for span in spans if isinstance(span.did, ToolExecution)]
    failed = [each for each in (seen[-1], seen[0]) if each.status in (ToolStatus.ERROR, ToolStatus.TIMEOUT)]
    counts = next((each for each in (*failed, *seen) if failed or each.result is not None), seen[0])
    return ToolResultReport(
        id=f"{first.trace}:{first.id}",
        tool=seen[0].tool,
        status=counts.status,
        tool_call_id=next((each.tool_call_id for each in seen if each.tool_call_id), None),
        arguments=next((each.arguments for each in seen if each.arguments is not None), None),
        result=counts.result,
        error=counts.error,
        agent=agent,
        span=outermost.id,
        parent_span=outermost.parent,
        started=outermost.started,
        ended=outermost.ended,
        adapter=SPANS,
        status_rule=counts.rule,
    )


class SpanTree:
    """The spans of one attempt or trace, added as they come in: inner spans before those around them."""

    def __init__(self, spans: Iterable[SeenSpan] = ()) -> None:
        self._spans: dict[tuple[str, str], SeenSpan] = {}
        for span in spans:
            self.add(span)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: SeenSpan) -> None:
        """Add a span; a later one with the same ids changes nothing."""
        self._spans.setdefault(span.key, span)

    def lineage(self, span: SeenSpan) -> list[SeenSpan]:
        """The span and those around it, as far as they are known; innermost first."""
        found: dict[tuple[str, str], SeenSpan] = {}
        place: SeenSpan | None = span
        while place is not None and place.key not in found and len(found) < _MAX_DEPTH:
            found[place.key] = place
            place = self._spans.get((place.trace, place.parent)) if place.parent else None
        return list(found.values())

    def calls(self) -> list[SeenCall]:
        """The LLM invocations in the order they started; spans with one response id, or one in another, are one.

        Two spans of one instrumentation are two calls all the same: some endpoints give every reply the same id.
        """
        spans = [span for span, did in self._ordered() if isinstance(did, ModelCall)]
        names: dict[tuple[str, str], str] = {}
        for span in spans:
            response_id = _response_id(span)
            if response_id is None:
                continue
            for each in self._calls_around(span):
                if names.setdefault(each.key, _response_id(each) or response_id) != response_id:
                    break
        groups: dict[object, list[SeenSpan]] = {}
        seen: dict[tuple[str, str], list[object]] = {}
        for span in spans:
            around = self._calls_around(span)
            outermost = around[-1].key
            named = next((names[each.key] for each in around if each.key in names), None)
            if named is None:
                groups.setdefault(outermost, []).append(span)
                continue
            earlier = seen.setdefault((named, span.scope), [])
            if outermost not in earlier:
                earlier.append(outermost)
            groups.setdefault((named, earlier.index(outermost)), []).append(span)
        return [self._call(group) for group in groups.values()]

    def tool_results(self) -> list[ToolResultReport]:
        """What the tools did, in the order they started."""
        runs: dict[tuple[str, str], list[SeenSpan]] = {}
        for span, did in self._ordered():
            if isinstance(did, ToolExecution):
                runs.setdefault(outermost_execution(self.lineage(span)).key, []).append(span)
        found = []
        for run in runs.values():
            run.sort(key=lambda span: len(self.lineage(span)))
            found.append(tool_result_of(run, agent_of(self.lineage(run[-1]))))
        return found

    def _ordered(self) -> Iterator[tuple[SeenSpan, ModelCall | ToolExecution]]:
        for span in sorted(self._spans.values(), key=lambda span: span.started or 0.0):
            if span.did is not None:
                yield span, span.did

    def _calls_around(self, span: SeenSpan) -> list[SeenSpan]:
        """A call's span, and those directly around it that are calls too; innermost first."""
        return list(itertools.takewhile(lambda each: isinstance(each.did, ModelCall), self.lineage(span)))

    def _call(self, spans: list[SeenSpan]) -> SeenCall:
        spans.sort(key=lambda span: len(self.lineage(span)))
        response_id = next(filter(None, map(_response_id, spans)), None)
        return SeenCall(response_id, identity_of(self.lineage(spans[-1])), tuple(spans))


def _is_same(inner: ModelCall | ToolExecution | None, outer: ToolExecution) -> bool:
    if not isinstance(inner, ToolExecution) or inner.tool != outer.tool:
        return False
    return None in (inner.tool_call_id, outer.tool_call_id) or inner.tool_call_id == outer.tool_call_id


def _response_id(span: SeenSpan) -> str | None:
    return span.did.response_id if isinstance(span.did, ModelCall) else None
