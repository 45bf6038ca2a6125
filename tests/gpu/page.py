"""docs/gpu.md, whose figures `make gpu` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .parts import Played

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- written by `make gpu` -->", "<!-- to here -->"
NO_FIGURES = "No figures yet: run `make gpu` on a machine with a CUDA GPU."


def written(page: str, machine: str, played: Sequence[Played]) -> str:
    """The page with these figures in place of those before."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    figures = "\n".join(each.markdown for each in played)
    return f"{before}{BEGIN}\n\nMeasured on: {machine}.\n\n{figures}\n{END}{after}"
