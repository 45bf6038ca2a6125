"""docs/gpu.md, whose figures `make gpu` writes."""

from __future__ import annotations

from pathlib import Path

from .parts import PARTS, Played

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- written by `make gpu` -->", "<!-- to here -->"
NO_FIGURES = "No figures yet: run `make gpu` on a machine with a CUDA GPU."


def written(page: str, machine: str, played: Played) -> str:
    """The page with what became of a part in place of what it had of that part; the others stay."""
    before, rest = page.split(BEGIN)
    figures, after = rest.split(END)
    sections = {each.partition("\n")[0]: each.strip() for each in figures.split("### ")[1:]}
    sections[played.part.title] = f"{played.part.title}\n\nMeasured on: {machine}.\n\n{played.body.strip()}"
    places = {part.title: place for place, part in enumerate(PARTS)}
    ordered = sorted(sections, key=lambda title: places.get(title, len(places)))
    text = "\n\n".join(f"### {sections[title]}" for title in ordered)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
