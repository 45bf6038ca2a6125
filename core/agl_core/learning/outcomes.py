"""What the tools did: each tool call told once, and read from the conversation where no adapter watches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from agl_core.capture.span_tree import FROM_SPANS
from agl_core.types import Call, Choice, Json, Outcome, OutcomeStatus, TransitionKey

FROM_MESSAGES = "messages:"
"""The ids of outcomes that were read from messages begin with this."""

_EMPTY = frozenset({"", "null", "None", "[]", "{}", "()", "set()", '""', "''"})
_NO_ERROR = frozenset({"", "none", "null", "nil", "no", "false", "0"})
"""Words for nothing."""
_SETTING = r"\s* \d+(?:\.\d+)? \s* \w* \s* \n"
"""What follows "timeout:" where it is one of several settings."""
_ERROR = re.compile(
    rf"""
    (?: (?: [\w.]{{1,200}}Error | [\w.]{{0,200}}Exception ) \s*:  # "ValueError: …", "sqlite3.OperationalError: …"
      | (?: \w{{1,40}}\. ){{0,9}} [A-Z]\w{{0,60}} (?: Error | Exception | Timeout | TimeoutExpired )
        (?: \.?\Z | \(["'\d)] | \s+["'\d] | : (?! {_SETTING} ) )  # "HTTPError 404", "KeyError('x')", the name alone
      | (?i:error) (?: [.!]?\Z | \s*: (?! \s* (?i: none | null | nil | no | false | 0 ) \s* (?: \n | \Z ) ) )
      | Error\ (?:executing|invoking)\ tool\b            # langgraph
      | An\ error\ occurred\ while\ running\ the\ tool   # OpenAI Agents SDK
      | Traceback\ \(most\ recent\ call\ last\) )
    """,
    re.VERBOSE,
)
_REASON = "|".join(re.escape(each.phrase) for each in HTTPStatus if each >= 400)
"""What stands beside the number of an HTTP error."""
_NUMBERED = re.compile(
    rf"""
    (?: (?: (?: http | api | server | client ) \s )? error \s (?: code \s )? [1-9]\d{{0,4}} \s*  # "Error 404: …"
        (?: \Z | [:;\n] | \.(?!\d) | [-–—([]? \s* (?: {_REASON} )\b | \(\w{{1,20}}\) \s* : )
      | error \s code: \s [1-9]\d{{0,4}} \b                                 # openai
      | (?: client | server ) \s error \s '[45]\d\d\s                      # httpx
      | [45]\d\d \s (?: client | server ) \s error:                        # requests
      | (?: http \s )? [45]\d\d \s (?: {_REASON} ) \s* (?: [.:\n] | \Z ) )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_WHO = r"""
    (?: (?: the | your | this | a | an ) \s )?
    (?: (?! (?: of | in | on | at | by | that | this | the | and | or | but | sa(?:id|ys) ) \b )
        [a-z][\w/'-]{0,40} \s ){0,2}
    (?: api | call | code | command | connection | download | execution | fetch | function | gateway | handshake | host
      | job | lookup | operation | page | process | query | read | request | response | script | search | server
      | socket | task | tool | transaction | url | write )
    (?: \s ["'`[] .{0,200}? ["'`\])] | \s (?: to | for | from | of | with ) \s \S{1,200} )?
"""
"""What can time out: "The read operation", "Command '['sleep', '9']'", "Request to https://…"."""
_TIMED_OUT = re.compile(
    rf"""
    (?! (?: no | not | none | neither | never | zero | if | when | why | how | whether | what | once | until | unless
          | because | after | before | each | every | any ) \b )
    (?: {_WHO} \s (?: ha[sd] \s )? )?
    (?: timed[ -]out (?: \s*\Z | \s?[.:;,!(–—-] | \s (?: after | during | trying | waiting | when | while ) \b )
      | time-?out
        (?: \s error )? (?: \s*\Z | \s?[.;!] | \s \(\d | \s?: (?! {_SETTING} )
          | \s (?: after | during | expired | occurred | reached | trying | waiting | when | while ) \b
          | \s (?: of \s )? \d\S* \s (?: \w+ \s )? exceeded \b ) )
    """,
    re.VERBOSE | re.IGNORECASE,
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
    begins like an exception ("ValueError: …", "KeyError('x')", "Error: …", a traceback), with the number of an error
    ("Error 404", "HTTPError 404", "404 Not Found") or with the sentence that langgraph or the OpenAI Agents SDK put
    before one; or it is a JSON object that has something under `error`: not null, false, 0, nothing or a word for
    these, nor a fraction, which is a measurement. TIMEOUT: an error whose beginning names a timeout, or a text that
    begins with one ("Timed out after 5 s", "The request timed out."). Else OK: a tool that tells of its failure in
    words of its own needs an adapter or a rule of the user's.

    >>> [str(message_status(each)) for each in ("22 °C", "5 errors", "null", "Error: no city", "TimeoutError: 5 s")]
    ['ok', 'ok', 'empty', 'error', 'timeout']
    >>> [str(message_status(each)) for each in ('{"error": null}', '{"error": "no such city"}', "Request timed out.")]
    ['ok', 'error', 'timeout']
    >>> str(message_status("no such city", "error"))
    'error'
    """
    text = message_text(content).strip()
    error = text if status == "error" or (status is None and _is_error(text)) else None
    if status is None and error is None:
        if _TIMED_OUT.match(text):
            return OutcomeStatus.TIMEOUT
        error = _error_in_json(text)
    if error is not None:
        return OutcomeStatus.TIMEOUT if _TIMEOUT.search(error[:_HEAD]) else OutcomeStatus.ERROR
    return OutcomeStatus.EMPTY if text in _EMPTY else OutcomeStatus.OK


def _is_error(text: str) -> bool:
    return bool(_ERROR.match(text) or _NUMBERED.match(text))


def _error_in_json(text: str) -> str | None:
    """What the text of a JSON object has under `error`, if that says that something went wrong."""
    if not text.startswith("{"):
        return None
    try:
        error = json.loads(text).get("error")
        told = str(error).strip()
    except (ValueError, RecursionError):
        return None
    is_none = not error or told.casefold() in _NO_ERROR or (isinstance(error, float) and not error.is_integer())
    return None if is_none else told


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
