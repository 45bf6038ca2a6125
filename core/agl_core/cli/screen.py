"""What commands print on."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from agl_core.cli.text import harmless

_UNLIMITED = 1 << 16


class Screen(Console):
    """A console on which every string is text, also in tables: no markup, and nothing that a terminal would obey.

    The terminal wraps lines. In a pipe or a file nothing is wrapped or cropped, unless COLUMNS says how wide it is.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(each, str) for each in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)
