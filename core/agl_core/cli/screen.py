"""What commands print on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from agl_core.cli.text import harmless


class Screen(Console):
    """A console on which every string is text, also in tables: no markup, and nothing that a terminal would obey."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)
