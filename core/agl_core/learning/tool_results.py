"""Tool results: one for each tool call, read from the conversation if no adapter reports it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_core.capture.spans import SPANS
from agl_core.capture.status import UNCERTAIN, message_status, message_text
from agl_core.types import Call, Choice, Json, Source, ToolResult, ToolStatus, TransitionKey

FAILED = (ToolStatus.ERROR, ToolStatus.TIMEOUT)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A tool call that a response asked for."""

    number: int
    """The place of the call, in the order of their starts."""
    call: Call
    key: TransitionKey
    place: int
    """Its place among the tool calls of its response."""
    tool_call: Mapping[str, Any]


def asked_for(calls: Sequence[Call]) -> dict[str, list[Asked]]:
    """The tool calls of all responses, in order, by their id: one id may have several if an endpoint reuses ids."""
    asked: dict[str, list[Asked]] = {}
    for number, call in enumerate(calls):
        for key, choice in choices_of(call).items():
            for place, tool_call in enumerate(tool_calls_of(choice.message)):
                asked.setdefault(tool_call["id"], []).append(Asked(number, call, key, place, tool_call))
    return asked


def choices_of(call: Call) -> dict[TransitionKey, Choice]:
    """A call's choices, each the first of its index."""
    found: dict[TransitionKey, Choice] = {}
    for choice in call.choices:
        found.setdefault(TransitionKey(call.rollout, call.attempt, call.id, choice.index), choice)
    return found


def distinct(tool_results: Iterable[ToolResult]) -> list[ToolResult]:
    """Each id once: the first report counts, and reports of the agent's own process come before those over OTLP."""
    found: dict[str, ToolResult] = {}
    for tool_result in tool_results:
        known = found.get(tool_result.id)
        if known is None or (known.source is Source.SPAN and tool_result.source is not Source.SPAN):
            found[tool_result.id] = tool_result
    return list(found.values())


def deduplicate(tool_results: Iterable[ToolResult]) -> list[ToolResult]:
    """The tool results of one attempt without duplicates: repeated ids, and tool calls that several adapters report.

    For each tool call id one adapter counts, with all its reports, because a tool may run twice. Reports of the agent's
    own code count as one adapter. Every adapter comes before spans. Among two adapters, the one whose run began first
    counts, because it ran the other.
    """
    reports = distinct(tool_results)
    best: dict[str, tuple[int, float, str]] = {}
    for tool_result in reports:
        if tool_result.tool_call_id is not None:
            found = _precedence(tool_result)
            best[tool_result.tool_call_id] = min(found, best.get(tool_result.tool_call_id, found))
    return [
        each for each in reports if each.tool_call_id is None or (each.adapter or "") == best[each.tool_call_id][-1]
    ]


def _precedence(tool_result: ToolResult) -> tuple[int, float, str]:
    started = math.inf if tool_result.started is None else tool_result.started
    return int(tool_result.adapter == SPANS), started, tool_result.adapter or ""


CONTRADICTED = "contradicted"
"""The rule of a tool result that the conversation shows, and that a report contradicts.

One calls it ok, the other a failure: the conversation counts. A report that calls it a failure joins no tool call.
"""
_FROM_ANYWHERE = (Source.COMMAND, Source.SPAN)
"""Sources whose reports any process can make that the agent starts."""


def completed(tool_result: ToolResult, asked: Asked, shown: ToolResult | None) -> ToolResult:
    """A report with what it leaves open, from the tool call that it answers and from what the conversation shows of it.

    What a rule found counts before what none did: a span without a result says less than the message with it. A failure
    that the model was shown counts before a report that anything may have made.
    """
    if tool_result.tool_call_id is None:
        tool_result = replace(tool_result, tool_call_id=asked.tool_call["id"])
    if tool_result.arguments is None:
        tool_result = replace(tool_result, arguments=_function(asked.tool_call)[1])
    if shown is not None and _is_denied(tool_result, shown):
        failure = replace(tool_result, status=shown.status, status_rule=CONTRADICTED, source=shown.source)
        return replace(failure, result=None, error=shown.error)
    if shown is None or tool_result.status_rule not in UNCERTAIN:
        return tool_result
    if tool_result.status_rule != "unknown" and shown.status_rule in UNCERTAIN:
        return tool_result
    is_result = shown.error is None and tool_result.result is None
    return replace(
        tool_result,
        status=shown.status,
        status_rule=shown.status_rule,
        error=shown.error,
        result=shown.result if is_result else None if shown.error is not None else tool_result.result,
    )


def _is_denied(tool_result: ToolResult, shown: ToolResult) -> bool:
    """Whether the model was shown a failure where a report, which anything may have made, looked and saw none."""
    return (
        tool_result.source in _FROM_ANYWHERE
        and tool_result.status not in FAILED
        and tool_result.status_rule not in ("unknown", "looks-like-error")
        and shown.status in FAILED
    )


def matched(tool_results: Iterable[ToolResult], asked: Iterable[Asked], spans: Collection[str]) -> dict[str, Asked]:
    """Which of these tool calls each report without an id answers, by the report's id: exactly one, or none.

    Tool and arguments are the same, the agent too if both are known, and the enclosing span if it is one of `spans`,
    which enclose calls; under the same span, arguments that the report leaves out may be any. No other report may
    answer the same tool call.
    """
    calls: dict[str, list[tuple[Asked, Json]]] = {}
    for each in asked:
        tool, arguments = _function(each.tool_call)
        calls.setdefault(tool, []).append((each, arguments))
    found: dict[str, Asked] = {}
    for tool_result in tool_results:
        alike = [
            each
            for each, arguments in calls.get(tool_result.tool, ())
            if (None in (tool_result.agent, each.call.agent) or tool_result.agent == each.call.agent)
            and (tool_result.parent_span == each.call.parent_span or tool_result.parent_span not in spans)
            and tool_result.arguments in (arguments, None if tool_result.parent_span in spans else arguments)
        ]
        if len(alike) == 1:
            found[tool_result.id] = alike[0]
    answers = Counter(found.values())
    return {id: each for id, each in found.items() if answers[each] == 1}


def marked(joined: Iterable[ToolResult], failures: Iterable[ToolResult]) -> list[ToolResult]:
    """Tool results; those that the conversation alone shows, and calls ok, are CONTRADICTED by failures of their tool.

    A failure that joins no tool call may be of any of them, unless the conversation shows as many of that tool.
    """
    joined = list(joined)
    open_failures = Counter(each.tool for each in failures if each.status in FAILED)
    shown = [each for each in joined if each.source is Source.CONVERSATION]
    open_failures.subtract(each.tool for each in shown if each.status in FAILED)
    return [
        replace(each, status_rule=CONTRADICTED)
        if open_failures[each.tool] > 0 and each.source is Source.CONVERSATION and each.status_rule in UNCERTAIN
        else each
        for each in joined
    ]


def read_from_messages(calls: Sequence[Call], asked: Mapping[str, Sequence[Asked]]) -> dict[Asked, ToolResult]:
    """The tool results in the `tool` messages of later requests of the same attempt, by the tool call.

    `calls` are in order. The first `tool` message that answers a tool call is its tool result; later requests repeat
    it. If several calls used the same id, a message answers the call whose prompt and reply come before it in the
    request, else the latest. A tool call that no later request answers has no tool result. See `message_status` for the
    status.
    """
    found: dict[Asked, Mapping[str, Any]] = {}
    for number, call in enumerate(calls if asked else ()):
        messages = messages_of(call)
        for tool_call_id, answers in _answers(messages).items():
            free = [each for each in asked.get(tool_call_id, ()) if each.number < number]
            for answer in reversed(answers):
                if free:
                    answered = _answered_by(answer, messages, free, found)
                    free = [each for each in free if each is not answered]
                    found.setdefault(answered, messages[answer.place])
    return {each: _tool_result(each, message) for each, message in found.items()}


@dataclass(frozen=True, slots=True)
class _Answer:
    """A `tool` message in a request: the first with its id after a message of the model."""

    place: int
    asking: int | None
    """The place of the model's message that asked for it, if that is in the request too."""


def _answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[_Answer]]:
    """By tool call id, in order."""
    found: dict[str, list[_Answer]] = {}
    asking: dict[str, int] = {}
    since: set[str] = set()
    for place, message in enumerate(messages):
        if message.get("role") == "assistant":
            since.clear()
            asking.update({tool_call["id"]: place for tool_call in tool_calls_of(message)})
        tool_call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(tool_call_id, str) and tool_call_id not in since:
            since.add(tool_call_id)
            found.setdefault(tool_call_id, []).append(_Answer(place, asking.get(tool_call_id)))
    return found


def _answered_by(
    answer: _Answer, messages: Sequence[Mapping[str, Any]], asked: Sequence[Asked], found: Mapping[Asked, Any]
) -> Asked:
    """The one of several tool calls with one id that a message answers."""
    if len(asked) == 1 or answer.asking is None:
        return asked[-1]
    echo, message = messages[answer.asking], messages[answer.place]
    alike = [each for each in asked if _is_echo(each.tool_call, echo)] or asked
    prompt = messages[: answer.asking]
    of_this = [each for each in alike if prompt == messages_of(each.call)]
    repeated = [each for each in of_this if found.get(each) == message]
    unanswered = [each for each in of_this if each not in found]
    return (repeated or unanswered or of_this or alike)[-1]


def _is_echo(tool_call: Mapping[str, Any], echo: Mapping[str, Any]) -> bool:
    """Whether a message of the model makes this tool call, whatever the formatting of its arguments."""
    tool, arguments = _function(tool_call)
    return any(each["id"] == tool_call["id"] and _function(each) == (tool, arguments) for each in tool_calls_of(echo))


def messages_of(call: Call) -> tuple[Mapping[str, Any], ...]:
    """The conversation that a request sent; what is not a message is ignored."""
    messages = call.request.get("messages")
    return tuple(m for m in messages if isinstance(m, Mapping)) if isinstance(messages, Sequence) else ()


def tools_of(call: Call) -> tuple[Mapping[str, Any], ...]:
    """The tools that a request offered; what is not an object is ignored."""
    tools = call.request.get("tools")
    return tuple(t for t in tools if isinstance(t, Mapping)) if isinstance(tools, list | tuple) else ()


def tool_calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of a message that a tool result can belong to: objects whose id is a text."""
    tool_calls = message.get("tool_calls")
    if not isinstance(tool_calls, Sequence):
        return []
    return [each for each in tool_calls if isinstance(each, Mapping) and isinstance(each.get("id"), str)]


def _tool_result(asked: Asked, message: Mapping[str, Any]) -> ToolResult:
    content, call = message.get("content"), asked.call
    status, rule = message_status(content, message.get("status"))
    failed = status in FAILED
    tool, arguments = _function(asked.tool_call)
    return ToolResult(
        id=f"{call.id}:{asked.key.choice}:{asked.place}",
        rollout=call.rollout,
        attempt=call.attempt,
        tool=tool,
        status=status,
        tool_call_id=asked.tool_call["id"],
        arguments=arguments,
        result=None if failed else content,
        error=message_text(content) if failed else None,
        agent=call.agent,
        parent_span=call.parent_span,
        source=Source.CONVERSATION,
        status_rule=rule,
    )


def _function(tool_call: Mapping[str, Any]) -> tuple[str, Json]:
    is_custom = tool_call.get("type") == "custom"
    function = tool_call.get("custom" if is_custom else "function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    passed = function.get("input") if is_custom else _parsed(function.get("arguments"))
    return name if isinstance(name, str) and name else "tool", passed


def _parsed(arguments: Json) -> Json:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
