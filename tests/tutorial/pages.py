"""The tutorial's pages as a program: files to write, and commands to run.

| fence | what it is |
|---|---|
| ``python`` or ``toml`` with a title | a file of that name |
| ``console`` | commands, each after ``$ ``; with a title they run in a second terminal until the next such block |

What commands print, in ``text`` blocks, is an example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorial").glob("[0-9]-*.md"))
_FENCE = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def is_file(self) -> bool:
        return self.language in ("python", "toml") and bool(self.title)

    @property
    def commands(self) -> list[str]:
        if self.language != "console":
            return []
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(match[1], match[2] or "", match[3]) for match in _FENCE.finditer(page)]
