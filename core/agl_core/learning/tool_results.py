"""Tools in a conversation: the tool calls of responses, and the messages that answer them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_core.capture.status import message_status, message_text
from agl_core.types import Call, Choice, Json, Source, ToolResult, ToolStatus, TransitionKey
from agl_core.types.forms import parse_if_json

_FAILED = (ToolStatus.ERROR, ToolStatus.TIMEOUT)
CONTRADICTED = "contradicted"
"""The rule of a tool result that the conversation shows, and that a report contradicts.

One calls it ok, the other a failure: the conversation counts. A report that calls it a failure joins no tool call.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ToolCall:
    """A tool call that a response asked for."""

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
    """The tool calls of all responses, in order."""
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

    `calls` are in order. The first `tool` message that answers a tool call is its tool result; later requests repeat
    it. If several calls used the same id, a message answers the call whose prompt and reply come before it in the
    request, else the latest. A tool call that no later request answers has no tool result. See `message_status` for the
    status.
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
    return [call for call in tool_calls if isinstance(call, Mapping) and isinstance(call.get("id"), str)]


def function_of(tool_call: Mapping[str, Any]) -> tuple[str, Json]:
    """The tool's name, and its arguments: parsed, if they are JSON."""
    is_custom = tool_call.get("type") == "custom"
    function = tool_call.get("custom" if is_custom else "function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    arguments: Json = function.get("input" if is_custom else "arguments")
    return name if isinstance(name, str) and name else "tool", arguments if is_custom else parse_if_json(arguments)
