"""Stored text on a terminal: shown, never obeyed."""

from __future__ import annotations

import logging


def harmless(text: str) -> str:
    """`text` as it is, but for what a terminal would obey.

    >>> harmless("red: \\x1b[31m")
    'red: ·[31m'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def printable(text: str, width: int, *, tail: bool = False) -> str:
    """`text` on one line, without what a terminal would obey, cut to `width` (at its beginning if `tail`)."""
    safe = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text)
    if len(safe) <= width:
        return safe
    return f"…{safe[-width + 1 :]}" if tail else f"{safe[: width - 1]}…"


class HarmlessFormatter(logging.Formatter):
    """Of log records, whose messages may quote agents."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
