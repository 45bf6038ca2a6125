"""Which call each tool result belongs to: by `tool_call_id`, by the tool call that it alone answers, or by the span
that encloses both; never by time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from agl_core.learning.tool_results import (
    FAILED,
    Asked,
    asked_for,
    choices_of,
    completed,
    deduplicate,
    distinct,
    marked,
    matched,
    read_from_messages,
)
from agl_core.types import Call, ToolResult, TransitionKey


def join_tool_results(
    calls: Sequence[Call], tool_results: Iterable[ToolResult], late: Collection[str | None] = ()
) -> tuple[dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The tool results of each transition that asked for them, and those that belong to no transition.

    `calls` are in order, `tool_results` in the order of their reports. For each tool call, one source counts (see
    `agl_core.learning.tool_results.deduplicate`). A tool result without an id answers the tool call that it alone fits
    (see `matched`), else it stands for the whole response of the only call under its span. What a report leaves open is
    taken from the conversation, and so is the tool result of a tool call without a report. `late` are the parent spans
    of calls that do not count: tool results under them may belong to these calls. A span after whose call an unknown
    agent made one says nothing (see `_uncertain`): what is under it is joined by its tool and arguments alone.
    """
    asked = asked_for(calls)
    read = read_from_messages(calls, asked)
    reported: dict[Asked, list[ToolResult]] = {}
    by_id: dict[tuple[str, str | None], list[ToolResult]] = {}
    others = []
    for tool_result in distinct(tool_results):
        if tool_result.tool_call_id in asked:
            by_id.setdefault((tool_result.tool_call_id or "", tool_result.adapter), []).append(tool_result)
        else:
            others.append(tool_result)
    for (tool_call_id, _), found in by_id.items():
        for each, tool_result in _answered(asked[tool_call_id], found, read):
            reported.setdefault(each, []).append(tool_result)
    without_id: dict[TransitionKey, list[ToolResult]] = {}
    uncertain = _uncertain(calls)
    spans = {span: under for span, under in _under_spans(calls).items() if span not in uncertain}
    unjoined, doubtful = [], []
    others = deduplicate(others)
    unnamed = {each.id: each for each in others if each.tool_call_id is None and each.parent_span not in late}
    open_ = (each for same in asked.values() for each in same if each not in reported)
    answers = matched(unnamed.values(), open_, spans)
    for tool_result in others:
        under = spans.get(tool_result.parent_span or "", [])
        if tool_result.id in answers:
            reported.setdefault(answers[tool_result.id], []).append(tool_result)
        elif tool_result.id in unnamed and len(under) == 1:
            without_id.setdefault(under[0], []).append(tool_result)
        else:
            unjoined.append(tool_result)
            doubtful += [tool_result] if tool_result.id in unnamed else []
    joined: dict[TransitionKey, list[ToolResult]] = {}
    for each in sorted((e for same in asked.values() for e in same), key=lambda e: (e.number, e.key.choice, e.place)):
        if each in reported:
            found = [completed(report, each, read.get(each)) for report in deduplicate(reported[each])]
            joined.setdefault(each.key, []).extend(found)
        elif each in read and not _is_told(read[each], without_id.get(each.key)):
            joined.setdefault(each.key, []).append(read[each])
    joined = _marked(joined, doubtful)
    for key, found in without_id.items():
        joined.setdefault(key, []).extend(found)
    return joined, unjoined


def _is_told(shown: ToolResult, told: Sequence[ToolResult] | None) -> bool:
    """Whether reports that stand for the whole response tell this too: a failure only if one of them is a failure."""
    return bool(told) and (shown.status not in FAILED or any(each.status in FAILED for each in told or ()))


def _marked(
    joined: Mapping[TransitionKey, Sequence[ToolResult]], doubtful: Sequence[ToolResult]
) -> dict[TransitionKey, list[ToolResult]]:
    every = iter(marked((each for same in joined.values() for each in same), doubtful))
    return {key: list(itertools.islice(every, len(same))) for key, same in joined.items()}


def _answered(
    asked: Sequence[Asked], tool_results: Sequence[ToolResult], read: Mapping[Asked, ToolResult]
) -> Iterable[tuple[Asked, ToolResult]]:
    """Each tool result with the tool call that it answers, among several with the same id.

    `tool_results` are those of one adapter, in its order. Each answers a tool call under the same span, else of the
    same agent; among these, one that the conversation shows to be answered, else the latest. Further tool results are
    of a tool that ran twice.
    """
    free = list(asked)
    waiting = [(tool_result.parent_span, tool_result.agent) for tool_result in tool_results]
    for number, tool_result in enumerate(tool_results):
        near = _near(tool_result, free) or _near(tool_result, asked)
        shown = [each for each in near if each in read] or near
        after = waiting[number:].count(waiting[number])
        chosen = shown[max(len(shown) - after, 0)]
        free = [each for each in free if each is not chosen]
        yield chosen, tool_result


def _near(tool_result: ToolResult, asked: Sequence[Asked]) -> Sequence[Asked]:
    """Those of the same parent span; if there are none, those of the same agent; if there are none, all."""
    under = [each for each in asked if tool_result.parent_span and each.call.parent_span == tool_result.parent_span]
    return under or [each for each in asked if tool_result.agent and each.call.agent == tool_result.agent] or asked


def _uncertain(calls: Iterable[Call]) -> set[str | None]:
    """The spans of calls that a call of an unknown agent followed: tools under them may be those of that call."""
    latest: dict[str | None, str] = {}
    found: set[str | None] = set()
    for call in calls:
        if call.is_unattributed:
            found.update(latest.values())
        elif call.parent_span is not None:
            latest[call.agent] = call.parent_span
    return found


def _under_spans(calls: Iterable[Call]) -> dict[str, list[TransitionKey]]:
    spans: dict[str, list[TransitionKey]] = {}
    for call in calls:
        if call.parent_span is not None:
            spans.setdefault(call.parent_span, []).extend(choices_of(call))
    return spans
