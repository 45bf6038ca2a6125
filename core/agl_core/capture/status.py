"""What became of a tool call: one rule for what adapters see, what spans say, and what conversations show.

A reported failure counts: an exception, or a status "error". A reported success counts only if the tool's author set
it: a framework calls every tool that did not raise a "success". Otherwise the result decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from http import HTTPStatus
from typing import Any

from agl_core.types import Json, ToolStatus

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
_TIMEOUT = re.compile(r"time[ds]?[\s_-]?out|deadline[\s_-]?exceeded", re.IGNORECASE)
_HEAD = 200
"""Characters of an error in which a timeout is looked for: its type and message, not what it quotes."""


def status_of(result: Any) -> ToolStatus:
    """What became of a tool call, by what it returned or raised.

    An exception that was raised from a timeout is a timeout. A text, and what a mapping has under `error`, says what it
    says in a message (see `message_status`); nothing else that was returned is an error.

    >>> [str(status_of(each)) for each in (7, "", [], ValueError(), TimeoutError())]
    ['ok', 'empty', 'empty', 'error', 'timeout']
    >>> [str(status_of(each)) for each in ("Error: no city", {"error": "no city"}, {"error": None, "rows": 3})]
    ['error', 'error', 'ok']
    """
    if isinstance(result, BaseException):
        return ToolStatus.TIMEOUT if _is_timeout(result) else ToolStatus.ERROR
    if result is None:
        return ToolStatus.EMPTY
    if isinstance(result, str):
        return message_status(result)
    if isinstance(result, bytes | Mapping | Sequence | Set) and len(result) == 0:
        return ToolStatus.EMPTY
    error = _under_error(result) if isinstance(result, Mapping) else None
    return ToolStatus.OK if error is None else failure_status(error)


def failure_status(error: str) -> ToolStatus:
    """Which failure an error's type or message tells of: what stands at its beginning, not what it quotes later.

    >>> str(failure_status("httpx.ReadTimeout: ")), str(failure_status("boom"))
    ('timeout', 'error')
    """
    return ToolStatus.TIMEOUT if _TIMEOUT.search(error[:_HEAD]) else ToolStatus.ERROR


def _is_timeout(error: BaseException) -> bool:
    # HTTP clients and subprocess have timeouts that are no TimeoutError; agl must not import them to know them.
    names = (kind.__name__ for kind in type(error).__mro__)
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return True
    return error.__cause__ is not None and _is_timeout(error.__cause__)


def message_status(content: Json, status: Json = None) -> ToolStatus:
    """What a `tool` message says became of the tool.

    `status` is what was told of it: "error", or "success" if the tool's author said so, and not the framework, which
    calls anything that did not raise a success. Otherwise the content decides.

    EMPTY: nothing, or what frameworks make of an empty result (null, None, [], {}). ERROR: it begins like an exception
    ("ValueError: …", "KeyError('x')", "Error: …", a traceback), with the number of an error ("Error 404", "HTTPError
    404", "404 Not Found") or with the sentence that langgraph or the OpenAI Agents SDK put before one; or it is a JSON
    object that has something under `error`: not null, false, 0, nothing or a word for these, nor a fraction, which is a
    measurement. TIMEOUT: an error whose beginning names a timeout, or a text that begins with one ("Timed out after
    5 s", "The request timed out."). Else OK: a tool that tells of its failure in words of its own needs an adapter or a
    rule of the user's.

    >>> [str(message_status(each)) for each in ("22 °C", "5 errors", "null", "Error: no city", "TimeoutError: 5 s")]
    ['ok', 'ok', 'empty', 'error', 'timeout']
    >>> [str(message_status(each)) for each in ('{"error": null}', '{"error": "no such city"}', "Request timed out.")]
    ['ok', 'error', 'timeout']
    >>> str(message_status("no such city", "error"))
    'error'
    """
    text = message_text(content).strip()
    if status == "error" or (status is None and _is_error(text)):
        return failure_status(text)
    if status is None:
        if _TIMED_OUT.match(text):
            return ToolStatus.TIMEOUT
        error = _error_in_json(text)
        if error is not None:
            return failure_status(error)
    return ToolStatus.EMPTY if text in _EMPTY else ToolStatus.OK


def _is_error(text: str) -> bool:
    return bool(_ERROR.match(text) or _NUMBERED.match(text))


def _error_in_json(text: str) -> str | None:
    """What the text of a JSON object has under `error`, if that says that something went wrong."""
    if not text.startswith("{"):
        return None
    try:
        return _under_error(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _under_error(result: Mapping[str, Any]) -> str | None:
    error = result.get("error")
    told = str(error).strip()
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
