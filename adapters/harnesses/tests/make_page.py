"""Writes the matrix of docs/harnesses.md: python -m adapters.harnesses.tests.make_page."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

from .matrix import SCENARIOS, TOOLS

PAGE = Path(__file__).parents[3] / "docs" / "harnesses.md"
COUNTED = Path(__file__).with_name("counted.json")
"""Calls and housekeeping of each program and test, which `make test-harnesses` counts."""
RELEASES = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
_SECTION = r"(?<=<!-- written by adapters/harnesses/tests/make_page.py -->\n).*?(?=<!-- to here -->)"


def render(page: str) -> str:
    """The page with the matrix written anew; a gap or a reservation has the number of its reason."""
    counted = json.loads(COUNTED.read_text())
    reasons = list(dict.fromkeys(r for tools in TOOLS.values() for r in (*tools.gaps.values(), *tools.notes.values())))
    head = ["scenario", *(f"{name} {RELEASES[name]['version']}" for name in TOOLS)]
    rows = [head, ["---"] * len(head)]
    for scenario, about in SCENARIOS.items():
        cells = []
        for tools in TOOLS.values():
            reason = tools.gaps.get(scenario) or tools.notes.get(scenario)
            number = f" ({reasons.index(reason) + 1})" if reason else ""
            cells.append(f"{'–' if scenario in tools.gaps else '✓'}{number}")
        rows.append([f"{scenario}: {about}", *cells])
    totals = {name: sum(map(Counter, counted.get(name, {}).values()), Counter[str]()) for name in TOOLS}
    rows.append(["calls in all", *(str(total["calls"]) for total in totals.values())])
    rows.append(["housekeeping among them", *(str(total["own"]) for total in totals.values())])
    for share, of in (("precision", "told"), ("recall", "own")):
        rows.append([share, *(f"{t['right'] / t[of]:.2f}" if t[of] else "–" for t in totals.values())])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    numbered = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    text = "\n".join(["", *lines, "", *numbered, "", ""])
    return re.sub(_SECTION, lambda _: text, page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
