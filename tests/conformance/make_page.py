"""Writes docs/frameworks.md from the scenarios and what the drivers declare: python -m tests.conformance.make_page."""

from __future__ import annotations

from pathlib import Path

from ..benchmarks.tables import replaced, table
from .apart import APART
from .driver import Driver
from .drivers import DRIVERS
from .peers.suites import PASSES, SUITES, Suite
from .scenarios import SCENARIOS, turns

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def render(page: str) -> str:
    """The page with its table of scenarios, its list of frameworks and the scores of suites written anew."""
    scenarios = (f"{s.name} | {s.about} | {len(turns(s)) * s.rollouts}" for s in SCENARIOS)
    sections = {
        "scenarios": table("scenario | what happens | calls", scenarios),
        "drivers": "\n".join(map(_driver, (*DRIVERS, *APART))),
        "suites": table("suite | release | tests | passes", map(_score, SUITES)),
    }
    for name, text in sections.items():
        page = replaced(page, f"tests/conformance/make_page.py, {name}", f"\n{text}\n")
    return page


def _driver(driver: Driver) -> str:
    """The APIs and forms that the driver plays, and its gaps."""
    streaming = "" if True in driver.streaming else ", without streaming"
    forms = ", ".join(f"`{form}`" for form in driver.forms)
    lines = [f"- **{driver.name}**: {', '.join(driver.apis)}{streaming}; {forms}."]
    for gap in driver.gaps:
        streams = ["streaming" if streams else "not streaming" for streams in gap.streaming]
        where = [*gap.apis, *streams, *(f"`{form}`" for form in gap.forms)]
        shown = f" ({', '.join(where)})" if where else ""
        lines.append(f"  - Gap: {gap.scenario}{shown}. {gap.reason}")
    return "\n".join(lines)


def _score(suite: Suite) -> str:
    """A suite's row: which of its tests are run, and how many of them pass."""
    expected = suite.expected
    total = sum(map(len, expected.groups.values()))
    passes = f"{len(expected.groups[PASSES])} of {total}"
    return f"{suite.distribution} | `{expected.release}` | {suite.about} | {passes}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
