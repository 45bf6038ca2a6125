"""What became of a tool call: one ordered table of rules for adapters, spans and conversations.

The first rule that matches decides, and its name is kept with the tool result (`ToolResult.status_rule`). A reported
failure counts: an exception, or a status "error". A reported success counts only if the tool's author set it, because
frameworks call every tool that did not raise a "success". Otherwise the result decides.

The table is in `status_rules`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from agl_core.capture.status_rules import Seen, message_text, status_rules
from agl_core.types import Json, ToolStatus

UNCERTAIN = frozenset({"unknown", "looks-like-error", "ok"})
"""Rules that found nothing: a source that knows more of the tool call overrides them."""
_TIMEOUT = re.compile(r"time[ds]?[\s_-]?out|deadline[\s_-]?exceeded", re.IGNORECASE)
_HEAD = 200
"""Characters of an error in which a timeout is looked for: its type and message, not what it quotes."""


class Decided(NamedTuple):
    """What became of a tool call, and the rule that decided it."""

    status: ToolStatus
    rule: str


def decide(seen: Seen) -> Decided:
    """What the first rule that matches says, of what is in `{"result": …}` if that is all there is.

    Google ADK 2.13.0 sends everything in it that is no dictionary.
    """
    while seen.raised is None and set(seen.fields) == {"result"}:
        inner = seen.fields["result"]
        is_text = isinstance(inner, str)
        seen = replace(seen, text=inner.strip() if is_text else "", value=None if is_text else inner)
    for rule in status_rules():
        error = rule.finds(seen)
        if error is not None:
            is_timeout = rule.status is ToolStatus.ERROR and _TIMEOUT.search(error[:_HEAD])
            return Decided(ToolStatus.TIMEOUT if is_timeout else rule.status, rule.name)
    raise AssertionError("the last rule always matches")


def status_of(result: Any) -> Decided:
    """What became of a tool call, by what it returned or raised.

    An exception that was raised from a timeout is a timeout. A text is read as in a message (see `message_status`).

    >>> [str(status_of(each).status) for each in (7, "", [], ValueError(), TimeoutError())]
    ['ok', 'empty', 'empty', 'error', 'timeout']
    >>> status_of({"error": "no city"}).rule, status_of({"error": None, "rows": 3}).rule
    ('error-field', 'ok')
    """
    if isinstance(result, BaseException):
        return decide(Seen(raised=result))
    return message_status(result) if result is None or isinstance(result, str) else decide(Seen(value=result))


def message_status(content: Json, status: Json = None) -> Decided:
    """What a `tool` message says became of the tool.

    `status` is what was reported of it: "error", or "success" if the tool's author said so, and not the framework,
    which calls anything that did not raise a success. Otherwise the content decides. A tool that words its failure in
    its own way needs an adapter or a rule of the user's.

    >>> [str(message_status(each).status) for each in ("22 °C", "5 errors", "null", "Error: no city", "Timed out.")]
    ['ok', 'ok', 'empty', 'error', 'timeout']
    >>> message_status("ValueError: no such city").rule, message_status("no such city", "error").rule
    ('exception', 'reported-error')
    """
    return decide(Seen(message_text(content).strip(), reported=status))


def failure_status(error: str) -> Decided:
    """Which failure an error's type or message names: at its beginning, not in what it quotes later.

    >>> str(failure_status("httpx.ReadTimeout: ").status), str(failure_status("boom").status)
    ('timeout', 'error')
    """
    return decide(Seen(error, reported="error"))


def unknown_status() -> Decided:
    """The status of a tool that did not fail, and of which nothing else is known."""
    return decide(Seen(is_known=False))
