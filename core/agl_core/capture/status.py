"""The status of a tool call: one ordered table of rules for adapters, spans and conversations.

The first rule that matches decides, and its name is kept with the tool result (`ToolResult.status_rule`). A reported
failure counts: an exception, or a status "error". A reported success counts only if the tool's author set it, because
frameworks call every tool that did not raise a "success". Otherwise the result decides. A framework's own words are
rules of its adapter (`agl_core.adapter(…, status_rules=…)`). docs/health.md has the table with examples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

from agl_core import kinds
from agl_core.plugins import Plugins
from agl_core.types import Json, ToolStatus
from agl_core.types.forms import parse_json

SPANS = "otel"
"""The `adapter` of tool results from OpenTelemetry's spans; a framework's own adapter counts before it."""
UNCERTAIN = frozenset({"unknown", "ok"})
"""Rules that found nothing: a source that knows more of the tool call overrides them."""
_TIMEOUT = re.compile(r"time[ds]?[\s_-]?out|deadline[\s_-]?exceeded", re.IGNORECASE)
_HEAD = 200
"""Characters of an error in which a timeout is looked for: its type and message, not what it quotes."""
_EMPTY = frozenset({"", "null", "None", "[]", "{}", "()", "set()", '""', "''"})
_NO_ERROR = frozenset({"", "none", "null", "nil", "no", "false", "0"})
_SETTING = r"\s* \d+(?:\.\d+)? \s* \w* \s* \n"
"""This follows "timeout:" where that is one of several settings."""
_REASON = "|".join(re.escape(status.phrase) for status in HTTPStatus if status >= 400)
_WHO = r"""
    (?: (?: the | your | this | a | an ) \s )?
    (?: (?! (?: of | in | on | at | by | that | this | the | and | or | but | sa(?:id|ys) ) \b )
        [a-z][\w/'-]{0,40} \s ){0,2}
    (?: api | call | code | command | connection | download | execution | fetch | function | gateway | handshake | host
      | job | lookup | operation | page | process | query | read | request | response | script | search | server
      | socket | task | tool | transaction | url | write )
    (?: \s ["'`[] .{0,200}? ["'`\])] | \s (?: to | for | from | of | with ) \s \S{1,200} )?
"""
"""Things that can time out: "The read operation", "Command '['sleep', '9']'", "Request to https://…"."""
_MAX_PRINTED = 20_000
"""Characters of a printed dictionary that is read: Python's own reader is slow."""


@dataclass(frozen=True)
class ToolRunFacts:
    text: str = ""
    """Its result, if that is a text."""
    value: Any = None
    """Its result, if that is no text."""
    raised: BaseException | None = None
    reported: Json = None
    """"error", or "success" if the tool's author set it."""
    is_known: bool = True

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The fields of a result that is a JSON object, or a dictionary as Python prints it."""
        return self.value if isinstance(self.value, Mapping) else _object(self.text)

    @property
    def is_empty(self) -> bool:
        if isinstance(self.value, bytes | Mapping | Sequence | Set):
            return len(self.value) == 0
        return self.value is None and self.text in _EMPTY


def _object(text: str) -> Mapping[str, Any]:
    try:
        if text.startswith("{'") and len(text) <= _MAX_PRINTED:
            value = ast.literal_eval(text)
        else:
            value = parse_json(text) if text.startswith("{") else {}
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, Mapping) else {}


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


Finder: TypeAlias = Callable[[ToolRunFacts], str | None]
"""The words of the failure, which may be none; None if the rule does not match."""


@dataclass(frozen=True, slots=True)
class StatusRule:
    name: str
    status: ToolStatus
    """An ERROR whose beginning names a timeout is a TIMEOUT."""
    finds: Finder


def begins(pattern: str) -> Finder:
    """Matches the beginning of a text (a verbose pattern); the group `error`, if there is one, is what failed."""
    compiled = re.compile(pattern, re.VERBOSE)

    def find(seen: ToolRunFacts) -> str | None:
        match = compiled.match(seen.text)
        return None if match is None else match.groupdict().get("error") or seen.text

    return find


def _if(condition: Callable[[ToolRunFacts], bool]) -> Finder:
    return lambda seen: seen.text if condition(seen) else None


def _status_error(seen: ToolRunFacts) -> str | None:
    if seen.fields.get("status") != "error":
        return None
    messages = (seen.fields.get(name) for name in ("error_message", "content", "message", "error"))
    return next((message_text(message) for message in messages if message), "")


def _error_field(seen: ToolRunFacts) -> str | None:
    error = seen.fields.get("error")
    text = str(error).strip()
    is_none = not error or text.casefold() in _NO_ERROR or (isinstance(error, float) and not error.is_integer())
    return None if is_none else text


_CODEX = re.compile(
    r"(?:Chunk ID: .*\n)?Wall time: [\d.]+ seconds\nProcess exited with code (-?\d+)\b"
    r"|Exit code: (-?\d+)\nWall time: [\d.]+ seconds\b"
)
_QWEN_CODE = re.compile(r"(-?\d+)\nSignal: .*\nProcess Group PGID: ")
_MINI_SWE_AGENT = {"returncode", "output", "output_head", "output_tail", "elided_chars", "warning", "exception_info"}


def _exit_code(seen: ToolRunFacts) -> int | None:
    """The exit status of a command, in the whole frame that a program has around it: a file may hold the words."""
    code = seen.fields.get("returncode")
    if type(code) is int and seen.fields.keys() <= _MINI_SWE_AGENT:
        return code
    head, _, tail = seen.text.rpartition("\nExit Code: ")
    is_framed = head.startswith("Command: ") and "\nDirectory: " in head and "\nOutput: " in head
    match = _QWEN_CODE.match(tail) if is_framed else _CODEX.match(seen.text)
    return None if match is None else int(next(filter(None, match.groups())))


def _is_timeout(error: BaseException) -> bool:
    # HTTP clients and subprocess have timeouts that are no TimeoutError; they are known by name, without their import.
    names = (kind.__name__ for kind in type(error).__mro__)
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return True
    return error.__cause__ is not None and _is_timeout(error.__cause__)


REPORTED = (
    StatusRule(
        "raised-timeout",
        ToolStatus.TIMEOUT,
        lambda seen: "" if seen.raised is not None and _is_timeout(seen.raised) else None,
    ),
    StatusRule("raised", ToolStatus.ERROR, lambda seen: None if seen.raised is None else ""),
    StatusRule("reported-error", ToolStatus.ERROR, _if(lambda seen: seen.reported == "error")),
    StatusRule("unknown", ToolStatus.OK, _if(lambda seen: not seen.is_known)),
    StatusRule("empty", ToolStatus.EMPTY, _if(lambda seen: seen.is_empty)),
    StatusRule("reported-success", ToolStatus.OK, _if(lambda seen: seen.reported is not None)),
)
"""Rules for what somebody said of the tool call."""

WORDS = (
    StatusRule("exit-code", ToolStatus.ERROR, lambda seen: "" if _exit_code(seen) else None),
    StatusRule("exit-0", ToolStatus.OK, lambda seen: "" if _exit_code(seen) == 0 else None),
    StatusRule("traceback", ToolStatus.ERROR, begins(r"Traceback\ \(most\ recent\ call\ last\)")),
    StatusRule(
        "exception",
        ToolStatus.ERROR,
        begins(rf"""
            (?: [\w.]{{1,200}}Error | [\w.]{{0,200}}Exception ) \s*:
          | (?: \w{{1,40}}\. ){{0,9}} [A-Z]\w{{0,60}} (?: Error | Exception | Timeout | TimeoutExpired )
            (?: \.?\Z | \(["'\d)] | \s+["'\d] | : (?! {_SETTING} ) )
        """),
    ),
    StatusRule(
        "error",
        ToolStatus.ERROR,
        begins(
            r"MCP\ tool\ '.{1,99}?'\ reported\ tool\ error"
            r' | Tool\ "[^"\n]{1,99}"\ (?: not\ found | is\ unavailable ) [^"\n]{0,40} \bMCP\ server\b'
            r" | (?: Wall\ time:\ \S+\ seconds\nOutput: )? (?i: error )"
            r" (?: [.!]?\Z | \s*: (?! \s* (?i: none | null | nil | no | false | 0 ) \s* (?: \n | \Z ) ) )"
        ),
    ),
    StatusRule(
        "http",
        ToolStatus.ERROR,
        begins(rf"""(?i:
            (?: (?: http | api | server | client ) \s )? error \s (?: code \s )? [1-9]\d{{0,4}} \s*
            (?: \Z | [:;\n] | \.(?!\d) | [-–—([]? \s* (?: {_REASON} )\b | \(\w{{1,20}}\) \s* : )
          | error \s code: \s [1-9]\d{{0,4}} \b
          | (?: client | server ) \s error \s '[45]\d\d\s
          | [45]\d\d \s (?: client | server ) \s error:
          | (?: http \s )? [45]\d\d \s (?: {_REASON} ) \s* (?: [.:\n] | \Z )
        )"""),
    ),
    StatusRule(
        "timed-out",
        ToolStatus.TIMEOUT,
        begins(rf"""(?i:
            (?! (?: no | not | none | neither | never | zero | if | when | why | how | whether | what | once | until
                  | unless | because | after | before | each | every | any ) \b )
            (?: {_WHO} \s (?: ha[sd] \s )? )?
            (?: timed[ -]out
                (?: \s*\Z | \s?[.:;,!(–—-] | \s (?: after | during | trying | waiting | when | while ) \b )
              | time-?out
                (?: \s error )? (?: \s*\Z | \s?[.;!] | \s \(\d | \s?: (?! {_SETTING} )
                  | \s (?: after | during | expired | occurred | reached | trying | waiting | when | while ) \b
                  | \s (?: of \s )? \d\S* \s (?: \w+ \s )? exceeded \b ) )
        )"""),
    ),
    StatusRule("status-field", ToolStatus.ERROR, _status_error),
    StatusRule(
        "is-error-field",
        ToolStatus.ERROR,
        lambda seen: "" if any(seen.fields.get(name) is True for name in ("isError", "is_error")) else None,
    ),
    StatusRule("error-field", ToolStatus.ERROR, _error_field),
    StatusRule("ok", ToolStatus.OK, lambda seen: ""),
)
"""Rules for what the result itself says; the last one always matches."""


@cache
def status_rules() -> tuple[StatusRule, ...]:
    """The whole table. A framework's own words, by the adapter's name, come before those that anybody may use."""
    adapters = sorted(Plugins.load().components(kinds.ADAPTER).items())
    brought = [rule for _, adapter in adapters for rule in adapter.status_rules]
    return (*REPORTED, *brought, *WORDS)


class Outcome(NamedTuple):
    status: ToolStatus
    rule: str


def decide(seen: ToolRunFacts) -> Outcome:
    """The status by the first rule that matches; some frameworks wrap results as `{"result": …}`."""
    while seen.raised is None and set(seen.fields) == {"result"}:
        inner = seen.fields["result"]
        is_text = isinstance(inner, str)
        seen = replace(seen, text=inner.strip() if is_text else "", value=None if is_text else inner)
    for rule in status_rules():
        error = rule.finds(seen)
        if error is not None:
            is_timeout = rule.status is ToolStatus.ERROR and _TIMEOUT.search(error[:_HEAD])
            return Outcome(ToolStatus.TIMEOUT if is_timeout else rule.status, rule.name)
    raise AssertionError("the last rule always matches")


def status_of(result: Any) -> Outcome:
    """The status of a tool call, by what it returned (a text as in `message_status`) or raised, also from a timeout.

    >>> [str(status_of(result).status) for result in (7, "", [], ValueError(), TimeoutError())]
    ['ok', 'empty', 'empty', 'error', 'timeout']
    >>> status_of({"error": "no city"}).rule, status_of({"error": None, "rows": 3}).rule
    ('error-field', 'ok')
    """
    if isinstance(result, BaseException):
        return decide(ToolRunFacts(raised=result))
    return message_status(result) if result is None or isinstance(result, str) else decide(ToolRunFacts(value=result))


def message_status(content: Json, status: Json = None) -> Outcome:
    """The status of a tool, by the `tool` message that answers its call.

    A reported `status` decides: "error", or "success" if the tool's author, and not the framework, said so; otherwise
    the content. A tool with words of its own for a failure needs an adapter or a rule of the user's.

    >>> [str(message_status(text).status) for text in ("22 °C", "5 errors", "null", "Error: no city", "Timed out.")]
    ['ok', 'ok', 'empty', 'error', 'timeout']
    >>> message_status("ValueError: no such city").rule, message_status("no such city", "error").rule
    ('exception', 'reported-error')
    """
    return decide(ToolRunFacts(message_text(content).strip(), reported=status))


def failure_status(error: str) -> Outcome:
    """The failure that an error's type or message names at its beginning.

    >>> str(failure_status("httpx.ReadTimeout: ").status), str(failure_status("boom").status)
    ('timeout', 'error')
    """
    return decide(ToolRunFacts(error, reported="error"))


def unknown_status() -> Outcome:
    """The status of a tool that did not fail, as far as is known."""
    return decide(ToolRunFacts(is_known=False))
