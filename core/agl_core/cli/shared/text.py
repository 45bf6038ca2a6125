"""What commands print: text that agents wrote is shown, and never obeyed by the terminal."""

from __future__ import annotations

import json
import logging
from typing import Any

import typer

from agl_core.analysis.text.words import harmless


def print_json(value: Any) -> None:
    """Print what analysis found as JSON. It is ASCII, so that a terminal obeys nothing of it."""
    from agl_core.analysis.text.plain import plain

    typer.echo(json.dumps(plain(value), indent=2))


class HarmlessFormatter(logging.Formatter):
    """Of log records, whose messages may quote agents."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))
