"""The spans of an attempt as a tree: which agent called what, as far as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agl_core.reading.explained import AttemptReport
from agl_core.types import ToolResult, Transition


@dataclass(frozen=True, slots=True)
class Span:
    """A call, a tool, or a span that is known only as the parent of others."""

    said: str
    kind: str
    """`chat`, `execute_tool` or `invoke_agent`, as OpenTelemetry calls them."""
    turn: int | None
    """Of a call."""
    seconds: float | None
    children: list[Span] = field(default_factory=list)


def span_tree(report: AttemptReport) -> Sequence[Span]:
    """The spans without a parent, each with those below it; none if no parent was recorded.

    Calls stand below the span in which they were made, in their order, and tools below theirs. A tool that is known by
    the id of its tool call alone stands below the call that asked for it.
    """
    transitions = report.episode.transitions
    results: list[tuple[Transition | None, ToolResult]] = [(t, r) for t in transitions for r in t.tool_results]
    results += [(None, result) for result in report.episode.unjoined]
    if not any(t.parent_span for t in transitions) and not any(r.parent_span for _, r in results):
        return ()
    roots: list[Span] = []
    named = {
        result.span: Span(result.tool, "execute_tool", None, _seconds(result.started, result.ended))
        for _, result in results
        if result.span
    }

    def inside(parent: str | None, agent: str | None) -> list[Span]:
        if parent is None:
            return roots
        if parent not in named:
            named[parent] = Span(agent or f"span {parent}", "invoke_agent", None, None)
            roots.append(named[parent])
        return named[parent].children

    calls = {}
    for transition in transitions:
        said = f"{transition.agent or 'unnamed agent'} asks {transition.policy}"
        calls[transition.key] = Span(said, "chat", transition.turn, None)
        inside(transition.parent_span, transition.agent).append(calls[transition.key])
    for asked_by, result in results:
        span = named[result.span] if result.span else Span(result.tool, "execute_tool", None, None)
        if result.parent_span and result.parent_span != result.span:
            inside(result.parent_span, result.agent).append(span)
        elif asked_by is not None:
            calls[asked_by.key].children.append(span)
        else:
            roots.append(span)
    return roots


def _seconds(started: float | None, ended: float | None) -> float | None:
    return None if started is None or ended is None else ended - started
