"""Tools: the tool calls of responses, the messages that answer them, and the tool results that are joined with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_core.capture.status import SPANS, UNCERTAIN, message_status, message_text
from agl_core.types import Call, Choice, Json, Source, ToolResult, ToolStatus, TransitionKey
from agl_core.types.forms import parse_if_json

_FAILED = (ToolStatus.ERROR, ToolStatus.TIMEOUT)
CONTRADICTED = "contradicted"
"""The rule of a tool result if the conversation and a report disagree whether it failed: the conversation counts."""
_FROM_ANYWHERE = (Source.COMMAND, Source.SPAN)
"""Sources whose reports any process can make that the agent starts."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolCall:
    number: int
    """The place of the call, in the order of their starts."""
    call: Call
    key: TransitionKey
    place: int
    """Its place among the tool calls of its response."""
    id: str
    tool: str
    arguments: Json


def tool_calls_in(calls: Sequence[Call]) -> list[ToolCall]:
    return [
        ToolCall(number, call, key, place, tool_call["id"], *function_of(tool_call))
        for number, call in enumerate(calls)
        for key, choice in choices_of(call).items()
        for place, tool_call in enumerate(tool_calls_of(choice.message))
    ]


def by_id(tool_calls: Iterable[ToolCall]) -> dict[str, list[ToolCall]]:
    """In order; one id may have several if an endpoint reuses ids."""
    grouped: dict[str, list[ToolCall]] = {}
    for tool_call in tool_calls:
        grouped.setdefault(tool_call.id, []).append(tool_call)
    return grouped


def read_from_messages(calls: Sequence[Call], tool_calls: Sequence[ToolCall]) -> dict[ToolCall, ToolResult]:
    """The tool results in the `tool` messages of later requests of the same attempt, by the tool call.

    The first `tool` message that answers a tool call counts; later requests repeat it. If several calls used one id, a
    message answers the call whose prompt and reply come before it in the request, else the latest.
    """
    known = by_id(tool_calls)
    answers: dict[ToolCall, Mapping[str, Any]] = {}
    for number, call in enumerate(calls if known else ()):
        messages = messages_of(call)
        for id, places in _answers(messages).items():
            free = [tool_call for tool_call in known.get(id, ()) if tool_call.number < number]
            for place, asking in reversed(places):
                if free:
                    answered = _answered(messages, place, asking, free, answers)
                    free = [tool_call for tool_call in free if tool_call is not answered]
                    answers.setdefault(answered, messages[place])
    return {tool_call: _tool_result(tool_call, message) for tool_call, message in answers.items()}


def _answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, int | None]]]:
    """By tool call id, the places of the `tool` messages that answer it, each the first after a message of the model.

    Beside each, the place of the model's message that asked for it, if that is in the request too.
    """
    answers: dict[str, list[tuple[int, int | None]]] = {}
    asking: dict[str, int] = {}
    since: set[str] = set()
    for place, message in enumerate(messages):
        if message.get("role") == "assistant":
            since.clear()
            asking.update({tool_call["id"]: place for tool_call in tool_calls_of(message)})
        id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(id, str) and id not in since:
            since.add(id)
            answers.setdefault(id, []).append((place, asking.get(id)))
    return answers


def _answered(
    messages: Sequence[Mapping[str, Any]],
    place: int,
    asking: int | None,
    tool_calls: Sequence[ToolCall],
    answers: Mapping[ToolCall, Any],
) -> ToolCall:
    """The one of several tool calls with one id that the message at `place` answers."""
    if len(tool_calls) == 1 or asking is None:
        return tool_calls[-1]
    echoes = [(echo["id"], *function_of(echo)) for echo in tool_calls_of(messages[asking])]
    alike = [t for t in tool_calls if (t.id, t.tool, t.arguments) in echoes] or tool_calls
    of_this = [tool_call for tool_call in alike if messages[:asking] == messages_of(tool_call.call)]
    repeated = [tool_call for tool_call in of_this if answers.get(tool_call) == messages[place]]
    unanswered = [tool_call for tool_call in of_this if tool_call not in answers]
    return (repeated or unanswered or of_this or alike)[-1]


def _tool_result(tool_call: ToolCall, message: Mapping[str, Any]) -> ToolResult:
    content, call = message.get("content"), tool_call.call
    status, rule = message_status(content, message.get("status"))
    failed = status in _FAILED
    return ToolResult(
        id=f"{call.id}:{tool_call.key.choice}:{tool_call.place}",
        rollout=call.rollout,
        attempt=call.attempt,
        tool=tool_call.tool,
        status=status,
        tool_call_id=tool_call.id,
        arguments=tool_call.arguments,
        result=None if failed else content,
        error=message_text(content) if failed else None,
        agent=call.agent,
        parent_span=call.parent_span,
        source=Source.CONVERSATION,
        status_rule=rule,
    )


def has_failed(tool_result: ToolResult) -> bool:
    """True if the tool raised, or did not end in time."""
    return tool_result.status in _FAILED


def choices_of(call: Call) -> dict[TransitionKey, Choice]:
    """A call's choices, each the first of its index."""
    choices: dict[TransitionKey, Choice] = {}
    for choice in call.choices:
        choices.setdefault(TransitionKey(call.rollout, call.attempt, call.id, choice.index), choice)
    return choices


def messages_of(call: Call) -> tuple[Mapping[str, Any], ...]:
    """The conversation that a request sent; what is not a message is ignored."""
    messages = call.request.get("messages")
    # Long conversations come again with each call, and `dict` is told much faster than an abstract class.
    return tuple(m for m in messages if isinstance(m, (dict, Mapping))) if isinstance(messages, Sequence) else ()


def tools_of(call: Call) -> tuple[Mapping[str, Any], ...]:
    """The tools that a request offered; what is not an object is ignored."""
    tools = call.request.get("tools")
    return tuple(t for t in tools if isinstance(t, Mapping)) if isinstance(tools, list | tuple) else ()


def tool_calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of a message that a tool result can belong to: objects whose id is a text."""
    tool_calls = message.get("tool_calls")
    if not isinstance(tool_calls, Sequence):
        return []
    return [call for call in tool_calls if isinstance(call, Mapping) and isinstance(call.get("id"), str)]


def function_of(tool_call: Mapping[str, Any]) -> tuple[str, Json]:
    """The tool's name, and its arguments: parsed, if they are JSON."""
    is_custom = tool_call.get("type") == "custom"
    function = tool_call.get("custom" if is_custom else "function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    arguments: Json = function.get("input" if is_custom else "arguments")
    return name if isinstance(name, str) and name else "tool", arguments if is_custom else parse_if_json(arguments)


def join_tool_results(
    calls: Sequence[Call], reports: Iterable[ToolResult], late: Collection[str | None] = ()
) -> tuple[dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The tool results of each transition that asked for them, and those that belong to no transition; never by time.

    `calls` and `reports` are in their order. `late` are the parent spans of calls that do not count: reports under them
    may belong to these. Three passes, the surest first, of which each takes what the one before left over: an id names
    a tool call, a span encloses some, and later requests of the agent show what reports leave open.
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

    If an endpoint uses one id for several tool calls, the reports of one adapter, in its order, each answer one under
    the same span, else of the same agent; among these, one that is `shown` to be answered, else the latest. Further
    reports are of a tool that ran twice.
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
    return {tool_call: of_one_adapter(of_call) for tool_call, of_call in answers.items()}, of_one_adapter(rest)


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

    A result that is shown alone, and looks right, is CONTRADICTED by failures of its tool among the `doubtful` reports,
    which join nothing and may be of any of them, unless as many failures of that tool are shown.
    """
    joined: dict[TransitionKey, list[ToolResult]] = {}
    open_calls: dict[TransitionKey, list[ToolCall]] = {key: [] for key in of_responses}
    for tool_call in tool_calls:
        message = shown.get(tool_call)
        if tool_call in answers:
            joined.setdefault(tool_call.key, []).extend(
                _completed(report, tool_call, message) for report in answers[tool_call]
            )
        elif tool_call.key in of_responses:
            open_calls[tool_call.key].append(tool_call)
        elif message is not None:
            joined.setdefault(tool_call.key, []).append(message)
    for key, reports in of_responses.items():
        messages = (shown[tool_call] for tool_call in open_calls[key] if tool_call in shown)
        failed = [message for message in messages if has_failed(message)]
        joined.setdefault(key, []).extend(_of_response(reports, failed, len(open_calls[key])))
    failures = Counter(report.tool for report in doubtful if has_failed(report))
    for results in joined.values():
        failures.subtract(r.tool for r in results if r.source is Source.CONVERSATION and has_failed(r))
    for results in joined.values():
        for place, result in enumerate(results):
            if result.source is Source.CONVERSATION and result.status_rule in UNCERTAIN and failures[result.tool] > 0:
                results[place] = replace(result, status_rule=CONTRADICTED)
    return joined


def _of_response(reports: Sequence[ToolResult], failed: Sequence[ToolResult], tool_calls: int) -> list[ToolResult]:
    """The reports that stand for the tool calls of a response, and of the failures shown there those that none tells.

    If these are more than tool calls, successes that anything may have reported give way, and the failures are
    CONTRADICTED.
    """
    untold = failed[sum(map(has_failed, reports)) :]
    forgeable = [report for report in reports if report.source in _FROM_ANYWHERE and not has_failed(report)]
    denials = forgeable[: max(0, len(reports) + len(untold) - tool_calls)] if untold else []
    if denials:
        untold = [replace(failure, status_rule=CONTRADICTED) for failure in untold]
    return [*untold, *(report for report in reports if report not in denials)]


def of_one_adapter(reports: Iterable[ToolResult]) -> list[ToolResult]:
    """The reports of one attempt, each id once, and those of each tool call by the one adapter that counts.

    This adapter counts with all its reports, because a tool may run twice; reports of the agent's own code count as of
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
    """Tool calls under the report's parent span, else those of its agent, else all."""
    under = [t for t in tool_calls if report.parent_span and t.call.parent_span == report.parent_span]
    return under or [t for t in tool_calls if report.agent and t.call.agent == report.agent] or tool_calls


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

    A status that a rule found comes before one that none found: a span without a result says less than the message with
    it. A failure that the model was shown comes before a success that any process may have reported.
    """
    report = replace(
        report,
        agent=tool_call.call.agent or report.agent,  # Another agent may have run the tool.
        tool_call_id=tool_call.id if report.tool_call_id is None else report.tool_call_id,
        arguments=tool_call.arguments if report.arguments is None else report.arguments,
    )
    if shown is None:
        return report
    if (
        report.source in _FROM_ANYWHERE
        and report.status_rule != "unknown"
        and not has_failed(report)
        and has_failed(shown)
    ):
        denied = replace(report, status=shown.status, status_rule=CONTRADICTED, source=shown.source)
        return replace(denied, result=None, error=shown.error)
    if report.status_rule not in UNCERTAIN or (report.status_rule != "unknown" and shown.status_rule in UNCERTAIN):
        return report
    result = None if shown.error is not None else shown.result if report.result is None else report.result
    return replace(report, status=shown.status, status_rule=shown.status_rule, error=shown.error, result=result)
