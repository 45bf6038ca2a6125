"""The tutorial's pages as a program: files to write, commands to run, and the boxes of what they print.

| fence | what it is |
|---|---|
| ``python`` or ``toml`` with a title | a file of that name |
| ``console`` | commands, each after ``$ ``; with a title they run in a second terminal until the next such block |
| ``text title="Expected"`` | what the commands before it print |
| ``text title="For instance"`` | the same, where each run prints something else: half of the lines have to fit |

A line ``…`` in a box stands for any lines, a ``…`` within a line for any text. Numbers, spaces and the lines of tables
may differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "tutorial"
PAGES = sorted(FOLDER.glob("[0-9]-*.md"))
ANY = "…"
INSTANCE = "For instance"

_FENCE = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.M | re.S)
_VOLATILE = (
    (re.compile(r"token=\S+"), "token=#"),
    (re.compile(r"(?<=capture-)[0-9a-f]{8}"), "#"),
    (re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?"), "#"),
    (re.compile(r"[━─]+"), "─"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    start: int
    """Where its text begins in the page."""

    @property
    def is_file(self) -> bool:
        return self.language in ("python", "toml") and bool(self.title)

    @property
    def is_box(self) -> bool:
        return self.language == "text" and self.title in ("Expected", INSTANCE)

    @property
    def shown(self) -> Callable[[str, str], str | None]:
        """What the box shows of an output; None if the output does not fit it."""
        return instance if self.title == INSTANCE else updated

    @property
    def commands(self) -> list[str]:
        if self.language != "console":
            return []
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(found[1], found[2] or "", found[3], found.start(3)) for found in _FENCE.finditer(page)]


def replaced(page: str, boxes: Sequence[tuple[Block, str]]) -> str:
    """The page with another text in these boxes."""
    for box, text in sorted(boxes, key=lambda each: each[0].start, reverse=True):
        page = page[: box.start] + text + page[box.start + len(box.text) :]
    return page


def updated(box: str, output: str) -> str | None:
    """The box with the lines of this output in the place of its own; None if the output does not fit it."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    pieces = _split(box.strip("\n").splitlines())
    result: list[str] = []
    position = 0
    for number, piece in enumerate(pieces):
        if number:
            result.append(ANY)
        first, last = number == 0, number == len(pieces) - 1
        starts = range(position, len(lines) - len(piece) + 1)
        if first:
            starts = starts[:1]
        if last and piece:
            starts = range(max(position, len(lines) - len(piece)), len(lines) - len(piece) + 1)
            if first and len(piece) != len(lines):
                return None
        found = next((at for at in starts if _all_fit(piece, lines[at : at + len(piece)])), None)
        if found is None:
            return None
        result += [mine if ANY in mine else real for mine, real in zip(piece, lines[found:], strict=False)]
        position = found + len(piece)
    return "\n".join(result) + "\n"


def instance(box: str, output: str) -> str | None:
    """The output, if its first line fits that of the box, and half of the box's lines fit some line of it."""
    mine, real = (text.strip("\n").splitlines() for text in (box, output))
    if not real or not _fits(mine[0], real[0]):
        return None
    fitting = sum(any(_fits(line, each) for each in real) for line in mine)
    return "\n".join(line.rstrip() for line in real) + "\n" if 2 * fitting >= len(mine) else None


def _split(box: Sequence[str]) -> list[list[str]]:
    """The lines between the lines that stand for any lines."""
    pieces: list[list[str]] = [[]]
    for line in box:
        if line.strip() == ANY:
            pieces.append([])
        else:
            pieces[-1].append(line)
    return pieces


def _all_fit(piece: Sequence[str], lines: Sequence[str]) -> bool:
    return all(_fits(mine, real) for mine, real in zip(piece, lines, strict=True))


def _fits(mine: str, real: str) -> bool:
    pattern = ".*".join(re.escape(_masked(part)) for part in mine.rstrip().split(ANY))
    return re.fullmatch(pattern, _masked(real.rstrip())) is not None


def _masked(text: str) -> str:
    for volatile, instead in _VOLATILE:
        text = volatile.sub(instead, text)
    return text
