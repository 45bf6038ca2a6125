"""Writes docs/conformance.md from the scenarios and what the drivers declare: python -m tests.conformance.make_page."""

from __future__ import annotations

import inspect
from pathlib import Path

from ..benchmarks.tables import replaced, table
from .apart import APART
from .driver import Driver
from .drivers import DRIVERS
from .peers.suites import PASSES, SUITES, Suite
from .scenarios import SCENARIOS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"


def render(page: str) -> str:
    """The page with its tables and lists written anew."""
    scenarios = (f"{s.name} | {s.about} | {len(s.turns()) * s.rollouts}" for s in SCENARIOS)
    example = Path(__file__).with_name("example_driver.py").read_text()
    sections = {
        "scenarios": table("scenario | what happens | calls", scenarios),
        "drivers": "\n\n".join(map(_driver, DRIVERS)),
        "apart": "\n\n".join(map(_driver, APART)),
        "suites": table("suite | release | passes", map(_score, SUITES)) + "\n\n" + "\n\n".join(map(_suite, SUITES)),
        "example": f"```python\n{example}```",
    }
    for name, text in sections.items():
        page = replaced(page, f"tests/conformance/make_page.py, {name}", f"\n{text}\n")
    return page


def _driver(driver: Driver) -> str:
    """The lines about what the driver plays, and its gaps."""
    lines = ["### " + driver.name, "", inspect.cleandoc(driver.__doc__ or ""), ""]
    streaming = "" if True in driver.streaming else ", without streaming"
    lines.append(f"- Played: {', '.join(driver.apis)}{streaming}; {', '.join(f'`{form}`' for form in driver.forms)}.")
    lines += [f"- Not played: {api}. {reason}" for api, reason in driver.without.items()]
    for gap in driver.gaps:
        streams = ["streaming" if streams else "not streaming" for streams in gap.streaming]
        where = [*gap.apis, *streams, *(f"`{form}`" for form in gap.forms)]
        shown = f" ({', '.join(where)})" if where else ""
        lines.append(f"- Gap: {gap.scenario}{shown}. {gap.reason}")
    return "\n".join(lines)


def _score(suite: Suite) -> str:
    """A suite's row: how many of its tests pass."""
    expected = suite.expected
    total = sum(map(len, expected.groups.values()))
    return f"{suite.name} | `{suite.distribution}=={expected.release}` | {len(expected.groups[PASSES])} of {total}"


def _suite(suite: Suite) -> str:
    """What is run of a suite, and why some of it does not pass."""
    lines = [f"### {suite.name}", "", suite.about, ""]
    lines += [f"- {len(tests)}: {why}." for why, tests in suite.expected.groups.items() if why != PASSES]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
