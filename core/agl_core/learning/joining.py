"""Which call each tool result belongs to; never by time.

Three passes, of which each takes what the one before left over:

1. `join_by_call_id`: a report that names a tool call answers it. One source counts for each.
2. `join_by_span`: a report without an id answers the tool call that it alone fits, else it stands for the whole
   response of the only call under its span.
3. `fill_from_conversation`: what later requests of the agent show fills what reports leave open, and tool calls without
   a report. Where it shows a failure that a report denies, the conversation wins, and the contradiction is marked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from agl_core.capture.recording import SPANS
from agl_core.capture.status import UNCERTAIN
from agl_core.learning.tool_results import (
    CONTRADICTED,
    ToolCall,
    by_id,
    choices_of,
    has_failed,
    read_from_messages,
    tool_calls_in,
)
from agl_core.types import Call, Source, ToolResult, TransitionKey

_FROM_ANYWHERE = (Source.COMMAND, Source.SPAN)
"""Sources whose reports any process can make that the agent starts."""


def join_tool_results(
    calls: Sequence[Call], reports: Iterable[ToolResult], late: Collection[str | None] = ()
) -> tuple[dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The tool results of each transition that asked for them, and those that belong to no transition.

    `calls` are in order, `reports` in the order in which they were made. `late` are the parent spans of calls that do
    not count: reports under them may belong to these calls.
    """
    tool_calls = tool_calls_in(calls)
    shown = read_from_messages(calls, tool_calls)
    answers, rest = join_by_call_id(tool_calls, reports, shown)
    open_calls = [tool_call for tool_call in tool_calls if tool_call not in answers]
    by_span, of_responses, unjoined = join_by_span(calls, open_calls, rest, late)
    answers |= by_span
    doubtful = [report for report in unjoined if _is_unnamed(report, late)]
    return fill_from_conversation(tool_calls, answers, of_responses, shown, doubtful), unjoined


def join_by_call_id(
    tool_calls: Sequence[ToolCall], reports: Iterable[ToolResult], shown: Collection[ToolCall]
) -> tuple[dict[ToolCall, list[ToolResult]], list[ToolResult]]:
    """The reports of each tool call whose id they have, and the reports that have none of these ids.

    An endpoint may use one id for several tool calls. Then the reports of one adapter, in its order, each answer a tool
    call under the same span, else of the same agent; among these, one that is `shown` to be answered, else the latest.
    Further reports are of a tool that ran twice.
    """
    known = by_id(tool_calls)
    answers: dict[ToolCall, list[ToolResult]] = {}
    waiting: dict[tuple[str, str | None], list[ToolResult]] = {}
    rest = []
    for report in _distinct(reports):
        if report.tool_call_id in known:
            waiting.setdefault((report.tool_call_id or "", report.adapter), []).append(report)
        else:
            rest.append(report)
    for (id, _), of_adapter in waiting.items():
        free = known[id]
        whose = [(report.parent_span, report.agent) for report in of_adapter]
        for number, report in enumerate(of_adapter):
            near = _near(report, free) or _near(report, known[id])
            candidates = [tool_call for tool_call in near if tool_call in shown] or near
            after = whose[number:].count(whose[number])
            answered = candidates[max(len(candidates) - after, 0)]
            free = [tool_call for tool_call in free if tool_call is not answered]
            answers.setdefault(answered, []).append(report)
    return {tool_call: of_one_adapter(told) for tool_call, told in answers.items()}, of_one_adapter(rest)


def join_by_span(
    calls: Sequence[Call], open_calls: Sequence[ToolCall], reports: Sequence[ToolResult], late: Collection[str | None]
) -> tuple[dict[ToolCall, list[ToolResult]], dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The reports without an id of each tool call and of each whole response, and those that are left over.

    A report fits an open tool call of the same tool and arguments, of the same agent if both are known, and under the
    same span if that encloses a call; then the report may lack arguments. It answers a tool call if it fits this one
    alone, and no other report fits it. A span after whose call an unknown agent made one encloses that too, perhaps:
    what is under it is joined by tool and arguments alone.
    """
    uncertain = _uncertain(calls)
    under: dict[str, list[TransitionKey]] = {}
    for call in calls:
        if call.parent_span is not None and call.parent_span not in uncertain:
            under.setdefault(call.parent_span, []).extend(choices_of(call))
    fitting: dict[str, ToolCall] = {}
    for report in reports:
        is_enclosed = report.parent_span in under
        if _is_unnamed(report, late):
            fits = [
                tool_call
                for tool_call in open_calls
                if report.tool == tool_call.tool
                and (None in (report.agent, tool_call.call.agent) or report.agent == tool_call.call.agent)
                and (report.parent_span == tool_call.call.parent_span or not is_enclosed)
                and (report.arguments == tool_call.arguments or (report.arguments is None and is_enclosed))
            ]
            if len(fits) == 1:
                fitting[report.id] = fits[0]
    claims = Counter(fitting.values())
    answers: dict[ToolCall, list[ToolResult]] = {}
    of_responses: dict[TransitionKey, list[ToolResult]] = {}
    unjoined = []
    for report in reports:
        keys = under.get(report.parent_span or "", ())
        if report.id in fitting and claims[fitting[report.id]] == 1:
            answers[fitting[report.id]] = [report]
        elif _is_unnamed(report, late) and len(keys) == 1:
            of_responses.setdefault(keys[0], []).append(report)
        else:
            unjoined.append(report)
    return answers, of_responses, unjoined


def fill_from_conversation(
    tool_calls: Sequence[ToolCall],
    answers: Mapping[ToolCall, Sequence[ToolResult]],
    of_responses: Mapping[TransitionKey, Sequence[ToolResult]],
    shown: Mapping[ToolCall, ToolResult],
    doubtful: Sequence[ToolResult],
) -> dict[TransitionKey, list[ToolResult]]:
    """The tool results of each transition: reports with what they leave open, and what is `shown` alone.

    Reports of a whole response stand for its tool calls: of these only a failure is added that no such report tells.
    What is shown alone, and looks right, is CONTRADICTED by failures of its tool among the `doubtful` reports, which
    join nothing and may be of any of them, unless as many failures of that tool are shown.
    """
    joined: dict[TransitionKey, list[ToolResult]] = {}
    for tool_call in tool_calls:
        message, told = shown.get(tool_call), of_responses.get(tool_call.key, ())
        if tool_call in answers:
            joined.setdefault(tool_call.key, []).extend(
                _completed(report, tool_call, message) for report in answers[tool_call]
            )
        elif message is not None and not (told and (not has_failed(message) or any(map(has_failed, told)))):
            joined.setdefault(tool_call.key, []).append(message)
    failures = Counter(report.tool for report in doubtful if has_failed(report))
    for results in joined.values():
        failures.subtract(each.tool for each in results if each.source is Source.CONVERSATION and has_failed(each))
    for results in joined.values():
        for place, each in enumerate(results):
            if each.source is Source.CONVERSATION and each.status_rule in UNCERTAIN and failures[each.tool] > 0:
                results[place] = replace(each, status_rule=CONTRADICTED)
    for key, told in of_responses.items():
        joined.setdefault(key, []).extend(told)
    return joined


def of_one_adapter(reports: Iterable[ToolResult]) -> list[ToolResult]:
    """The reports of one attempt, each id once, and those of each tool call by the one adapter that counts.

    That adapter counts with all its reports, because a tool may run twice; reports of the agent's own code count as of
    one adapter. Every adapter comes before spans. Among two, the one whose run began first counts: it ran the other.
    """
    reports = _distinct(reports)
    best: dict[str, tuple[bool, float, str]] = {}
    for report in reports:
        if report.tool_call_id is not None:
            started = math.inf if report.started is None else report.started
            rank = (report.adapter == SPANS, started, report.adapter or "")
            best[report.tool_call_id] = min(rank, best.get(report.tool_call_id, rank))
    return [r for r in reports if r.tool_call_id is None or (r.adapter or "") == best[r.tool_call_id][-1]]


def _distinct(reports: Iterable[ToolResult]) -> list[ToolResult]:
    """Each id once: the first counts, and reports of the agent's own process come before those over OTLP."""
    distinct: dict[str, ToolResult] = {}
    for report in reports:
        known = distinct.get(report.id)
        if known is None or (known.source is Source.SPAN and report.source is not Source.SPAN):
            distinct[report.id] = report
    return list(distinct.values())


def _is_unnamed(report: ToolResult, late: Collection[str | None]) -> bool:
    return report.tool_call_id is None and report.parent_span not in late


def _near(report: ToolResult, tool_calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Those of the same parent span; if there are none, those of the same agent; if there are none, all."""
    under = [each for each in tool_calls if report.parent_span and each.call.parent_span == report.parent_span]
    return under or [each for each in tool_calls if report.agent and each.call.agent == report.agent] or tool_calls


def _uncertain(calls: Iterable[Call]) -> set[str | None]:
    """The spans of calls that a call of an unknown agent followed: tools under them may be those of that call."""
    latest: dict[str | None, str] = {}
    uncertain: set[str | None] = set()
    for call in calls:
        if call.is_unattributed:
            uncertain.update(latest.values())
        elif call.parent_span is not None:
            latest[call.agent] = call.parent_span
    return uncertain


def _completed(report: ToolResult, tool_call: ToolCall, shown: ToolResult | None) -> ToolResult:
    """A report with what it leaves open, from the tool call that it answers and from what the conversation shows of it.

    What a rule found counts before what none did: a span without a result says less than the message with it. A failure
    that the model was shown counts before a report that anything may have made, and that looked and saw none.
    """
    report = replace(
        report,
        agent=tool_call.call.agent or report.agent,  # Another agent may have run the tool.
        tool_call_id=tool_call.id if report.tool_call_id is None else report.tool_call_id,
        arguments=tool_call.arguments if report.arguments is None else report.arguments,
    )
    if shown is None:
        return report
    has_looked = report.status_rule not in ("unknown", "looks-like-error")
    if report.source in _FROM_ANYWHERE and has_looked and not has_failed(report) and has_failed(shown):
        denied = replace(report, status=shown.status, status_rule=CONTRADICTED, source=shown.source)
        return replace(denied, result=None, error=shown.error)
    if report.status_rule not in UNCERTAIN or (report.status_rule != "unknown" and shown.status_rule in UNCERTAIN):
        return report
    result = None if shown.error is not None else shown.result if report.result is None else report.result
    return replace(report, status=shown.status, status_rule=shown.status_rule, error=shown.error, result=result)
