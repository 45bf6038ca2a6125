"""What commands print: text that agents wrote is shown, and never obeyed by the terminal."""

from __future__ import annotations

import json
import logging
from typing import Any

import typer

from agl_core.types import Source, ToolResult

_NOISE = 1e-12
"""Rewards, credits, advantages and weights are not as small; the rounding error of a sum of them is."""


def harmless(text: str) -> str:
    """`text` with a dot in place of each character that a terminal would obey.

    >>> harmless("red: \\x1b[31m")
    'red: ·[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def printable(text: str, width: int, *, tail: bool = False) -> str:
    """`text` on one line of at most `width` characters, of which a terminal obeys none; `tail` keeps its end."""
    safe = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text)
    if len(safe) <= width:
        return safe
    return f"…{safe[-width + 1 :]}" if tail else f"{safe[: width - 1]}…"


def status_text(tool_result: ToolResult) -> str:
    """Its status, and the rule that decided it where the status alone does not say what was seen.

    >>> from agl_core.types import ToolStatus
    >>> status_text(ToolResult("1", "r", 0, "add", ToolStatus.ERROR, status_rule="langgraph"))
    'error by langgraph'
    """
    status, rule = tool_result.status.value, tool_result.status_rule
    return status if rule is None or rule == status else f"{status} by {printable(rule, 40)}"


_SAID_BY = {
    Source.CONVERSATION: "as the conversation shows",
    Source.ADAPTER: "by the agent's process",
    Source.SPAN: "by a span over OTLP",
    Source.COMMAND: "by a process of the command",
}


def said_by(tool_result: ToolResult) -> str:
    """Who said what a tool did, and with which adapter.

    >>> from agl_core.types import ToolStatus
    >>> said_by(ToolResult("1", "r", 0, "add", ToolStatus.OK, source=Source.COMMAND, adapter="langchain"))
    'by a process of the command, langchain'
    """
    adapter = "" if tool_result.adapter is None else f", {printable(tool_result.adapter, 40)}"
    return _SAID_BY[tool_result.source] + adapter


def number(value: float, digits: int = 6) -> str:
    """A number with `digits` significant digits; the rounding error of a sum is 0.

    >>> number(7.6e-18), number(2 / 3), number(1e-7)
    ('0', '0.666667', '1e-07')
    """
    return "0" if abs(value) < _NOISE else f"{value:.{digits}g}"


def score(value: float | None) -> str:
    """A mean reward; a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"


def print_json(value: Any) -> None:
    """Print what analysis found as JSON. It is ASCII, so that a terminal obeys nothing of it."""
    from agl_core.analysis.plain import plain

    typer.echo(json.dumps(plain(value), indent=2))


class HarmlessFormatter(logging.Formatter):
    """Of log records, whose messages may quote agents."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
