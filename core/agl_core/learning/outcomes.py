"""What the tools did: each tool call told once, and read from the conversation where no adapter watches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agl_core.capture.span_tree import FROM_SPANS
from agl_core.types import Call, Choice, Json, Outcome, OutcomeStatus, TransitionKey

FROM_MESSAGES = "messages:"
"""The ids of outcomes that were read from messages begin with this."""

_EMPTY = frozenset({"", "null", "None", "[]", "{}", "()", "set()", '""', "''"})
_ERROR = re.compile(
    r"""
    (?: (?: [\w.]*(?:Error|Exception) | (?i:error) ) \s*:  # "Error: …", "ValueError: …", "sqlite3.OperationalError: …"
      | Error\ (?:executing|invoking)\ tool\b            # langgraph
      | An\ error\ occurred\ while\ running\ the\ tool   # OpenAI Agents SDK
      | Traceback\ \(most\ recent\ call\ last\) )
    """,
    re.VERBOSE,
)
_TIMEOUT = re.compile("timed?[ -]?out", re.IGNORECASE)
_HEAD = 200
"""Characters of an error in which a timeout is looked for: its type and message, not what it quotes."""


def told_once(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes of one attempt without what was told twice: an id again, or a tool call by several sources.

    What an outcome's id begins with, up to a colon, is its source (`langchain:…`, `otel:…`; ids without a colon have
    one source together). Of each tool call id, one source counts, with all that it tells of it, for a tool may run
    twice. An adapter, or the agent's own mark, goes before spans, and these before the messages; of two adapters the
    one whose run began first counts, which is the one that ran the other.
    """
    told: dict[str, Outcome] = {}
    for outcome in outcomes:
        told.setdefault(outcome.id, outcome)
    best: dict[str, tuple[int, float, str]] = {}
    for outcome in told.values():
        if outcome.tool_call_id is not None:
            found = _precedence(outcome)
            best[outcome.tool_call_id] = min(found, best.get(outcome.tool_call_id, found))
    return [each for each in told.values() if each.tool_call_id is None or _source(each) == best[each.tool_call_id][-1]]


def _precedence(outcome: Outcome) -> tuple[int, float, str]:
    rank = 2 if outcome.id.startswith(FROM_MESSAGES) else 1 if outcome.id.startswith(FROM_SPANS) else 0
    return rank, math.inf if outcome.started is None else outcome.started, _source(outcome)


def _source(outcome: Outcome) -> str:
    source, colon, _ = outcome.id.partition(":")
    return source if colon else ""


def outcomes_from_messages(
    calls: Sequence[Call], joined: Mapping[TransitionKey, Sequence[Outcome]] | None = None
) -> list[Outcome]:
    """The outcomes that later requests of the same attempt tell by their `tool` messages.

    `calls` are in order; the first `tool` message with a tool call's id is its outcome. `joined` is what adapters
    reported, which wins: nothing is added to a tool call that has an outcome, nor to a response that has outcomes
    without ids. A tool call that no later request answers has no outcome. See `message_status` for the status.
    """
    asked: dict[str, tuple[Call, Mapping[str, Any]]] = {}
    found: dict[str, Outcome] = {}
    for call in calls:
        for message in _tool_messages(call):
            tool_call_id = message.get("tool_call_id")
            if isinstance(tool_call_id, str) and tool_call_id in asked and tool_call_id not in found:
                found[tool_call_id] = _outcome(*asked[tool_call_id], message)
        for tool_call in _unreported(call, joined or {}):
            asked.setdefault(tool_call["id"], (call, tool_call))
    return list(found.values())


def message_status(content: Json, status: Json = None) -> OutcomeStatus:
    """What a `tool` message says became of the tool.

    `status` is the message's own field, where a framework sends one (LangChain's "success" or "error"). Otherwise
    the content decides. EMPTY: nothing, or what frameworks make of an empty result (null, None, [], {}). ERROR: it
    begins like an exception ("ValueError: …", "Error: …", a traceback) or with the sentence that langgraph or
    the OpenAI Agents SDK put before one. TIMEOUT: an error whose beginning names a timeout. Else OK: a tool that tells
    of its failure in words of its own needs an adapter or a rule of the user's.

    >>> [str(message_status(each)) for each in ("22 °C", "5 errors", "null", "Error: no city", "TimeoutError: 5 s")]
    ['ok', 'ok', 'empty', 'error', 'timeout']
    >>> str(message_status("no such city", "error"))
    'error'
    """
    text = message_text(content).strip()
    if status == "error" or (status is None and _ERROR.match(text)):
        return OutcomeStatus.TIMEOUT if _TIMEOUT.search(text[:_HEAD]) else OutcomeStatus.ERROR
    return OutcomeStatus.EMPTY if text in _EMPTY else OutcomeStatus.OK


def message_text(content: Json) -> str:
    """A message's content as text: a string, or the text of its parts; other parts (images) as their type.

    >>> message_text([{"type": "text", "text": "22 °C"}, {"type": "image_url", "image_url": {"url": "…"}}])
    '22 °C[image_url]'
    """
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return content if isinstance(content, str) else "" if content is None else str(content)


def _part_text(part: Json) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"


def _tool_messages(call: Call) -> Iterator[Mapping[str, Any]]:
    return (message for message in messages_of(call) if message.get("role") == "tool")


def messages_of(call: Call) -> tuple[Mapping[str, Any], ...]:
    """The conversation that a request sent; what is no message is passed over."""
    messages = call.request.get("messages")
    return tuple(m for m in messages if isinstance(m, Mapping)) if isinstance(messages, Sequence) else ()


def tool_calls_of(choice: Choice) -> list[Mapping[str, Any]]:
    """The tool calls of a response that an outcome can belong to: objects whose id is a text."""
    tool_calls = choice.message.get("tool_calls")
    if not isinstance(tool_calls, Sequence):
        return []
    return [each for each in tool_calls if isinstance(each, Mapping) and isinstance(each.get("id"), str)]


def _unreported(call: Call, joined: Mapping[TransitionKey, Sequence[Outcome]]) -> Iterator[Mapping[str, Any]]:
    """The tool calls of a call's responses that no adapter reported on."""
    for choice in call.choices:
        key = TransitionKey(call.rollout, call.attempt, call.id, choice.index)
        reported = {outcome.tool_call_id for outcome in joined.get(key, ())}
        if None not in reported:
            yield from (each for each in tool_calls_of(choice) if each["id"] not in reported)


def _outcome(call: Call, tool_call: Mapping[str, Any], message: Mapping[str, Any]) -> Outcome:
    content = message.get("content")
    status = message_status(content, message.get("status"))
    failed = status in (OutcomeStatus.ERROR, OutcomeStatus.TIMEOUT)
    function = tool_call.get("function")
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    return Outcome(
        id=f"{FROM_MESSAGES}{call.id}:{tool_call['id']}",
        rollout=call.rollout,
        attempt=call.attempt,
        tool=name if isinstance(name, str) and name else "tool",
        status=status,
        tool_call_id=tool_call["id"],
        arguments=_parsed(function.get("arguments")),
        result=None if failed else content,
        error=message_text(content) if failed else None,
        agent=call.agent,
        parent_span=call.parent_span,
    )


def _parsed(arguments: Json) -> Json:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
