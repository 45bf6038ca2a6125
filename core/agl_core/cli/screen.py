"""Options and output that commands share; the terminal never obeys agents' text."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agl_core.cli.words import harmless, plain

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]

_UNLIMITED = 1 << 16


def print_json(value: Any) -> None:
    """Print a result as JSON. It is ASCII, so that a terminal obeys nothing of it."""
    typer.echo(json.dumps(plain(value), indent=2))


def table(*columns: str, numbers: tuple[str, ...] = (), **options: Any) -> Table:
    """A table with these columns, and `numbers`, to the right and never broken."""
    rows = Table(*columns, **options)
    for column in numbers:
        rows.add_column(column, justify="right", no_wrap=True)
    return rows


class Screen(Console):
    """A console for plain text, also in tables: no markup, and nothing that a terminal would obey.

    In a pipe or a file nothing is wrapped or cropped, unless COLUMNS says how wide it is.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(printed, str) for printed in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)
