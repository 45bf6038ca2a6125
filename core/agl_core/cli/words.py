"""Recorded values as text and JSON for commands and pages, without characters that steer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize

if TYPE_CHECKING:  # These types take longer to import than the help of a command line may take.
    from agl_core.types import ToolResult

size = filesize.decimal
ROUNDING = 1e-12
"""The rounding error of sums; rewards, credits, advantages and weights are larger."""


def harmless(text: str) -> str:
    """`text` with a dot for each character that steers: a terminal's commands, the direction of writing.

    >>> harmless("red: \\x1b[31m"), harmless("evil\\u202egnp.exe")
    ('red: ·[31m', 'evil·gnp.exe')
    """
    if text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable():  # As nearly every text is.
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def one_line(text: str, width: int, *, tail: bool = False) -> str:
    """`text` on one harmless line of at most `width` characters; `tail` keeps its end.

    >>> one_line("two\\nlines", 7)
    'two⏎li…'
    """
    safe = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text)
    if len(safe) <= width:
        return safe
    return f"…{safe[-width + 1 :]}" if tail else f"{safe[: width - 1]}…"


def amount(count: int, noun: str) -> str:
    """A number of things.

    >>> amount(1, "call"), amount(2, "call")
    ('1 call', '2 calls')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def status_text(tool_result: ToolResult) -> str:
    """Its status, and the rule that decided it, unless the status is the rule's name.

    >>> from agl_core.types import ToolResult, ToolStatus
    >>> status_text(ToolResult("1", "r", 0, "add", ToolStatus.ERROR, status_rule="langgraph"))
    'error by langgraph'
    """
    status, rule = tool_result.status.value, tool_result.status_rule
    return status if rule is None or rule == status else f"{status} by {one_line(rule, 40)}"


def said_by(tool_result: ToolResult) -> str:
    """The source of a tool result, and its adapter.

    >>> from agl_core.types import Source, ToolResult, ToolStatus
    >>> said_by(ToolResult("1", "r", 0, "add", ToolStatus.OK, source=Source.COMMAND, adapter="langchain"))
    'by a process of the command, langchain'
    """
    from agl_core.types import Source

    reporters = {
        Source.CONVERSATION: "as the conversation shows",
        Source.ADAPTER: "by the agent's process",
        Source.SPAN: "by a span over OTLP",
        Source.COMMAND: "by a process of the command",
    }
    adapter = "" if tool_result.adapter is None else f", {one_line(tool_result.adapter, 40)}"
    return reporters[tool_result.source] + adapter


def number(value: float, digits: int = 6) -> str:
    """A number with `digits` significant digits; the rounding error of a sum is 0.

    >>> number(7.6e-18), number(2 / 3), number(1e-7)
    ('0', '0.666667', '1e-07')
    """
    return "0" if abs(value) < ROUNDING else f"{value:.{digits}g}"


def score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def plain(value: Any) -> Any:
    """A value made of JSON, dataclasses, records and paths, as JSON alone; numbers that JSON lacks become texts.

    >>> plain({"path": Path("runs/calc"), "values": (1.0, math.inf)})
    {'path': 'runs/calc', 'values': [1.0, 'inf']}
    """
    if is_dataclass(value):
        if type(value).__module__.startswith("agl_core.types."):
            from agl_core.types.forms import to_json

            return plain(to_json(value))
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
