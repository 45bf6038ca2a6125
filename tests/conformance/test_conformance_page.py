"""The page says what the scenarios and the drivers say."""

from __future__ import annotations

from pathlib import Path

from .apart import APART
from .driver import CHAT, MESSAGES, RESPONSES
from .drivers import DRIVERS
from .page import pairwise, render
from .scenarios import SCENARIOS, cells


def test_the_page_is_up_to_date() -> None:
    here = Path(__file__).parent
    page = render(DRIVERS, APART, (here / "example_driver.py").read_text())
    assert (here.parents[1] / "docs" / "conformance.md").read_text() == page, "python -m tests.conformance.make_page"


def test_the_page_names_every_scenario_driver_and_gap() -> None:
    page = render(DRIVERS, APART, "")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for scenario in SCENARIOS:
        assert sum(row.startswith(f"| {scenario.name} |") for row in rows) == 1 + len(DRIVERS) + len(APART)
    for driver in (*DRIVERS, *APART):
        part = page.split(f"### {driver.name}\n")[1].split("###")[0]
        assert all(gap.reason in part for gap in driver.gaps)
        assert part.count("gap ") >= len(driver.gaps)


def test_every_api_is_played_or_named_as_a_gap() -> None:
    for driver in (*DRIVERS, *APART):
        assert [*driver.apis, *driver.without] == [CHAT, RESPONSES, MESSAGES]


def test_scenarios_have_names_of_their_own_and_agents_known_by_their_prompts() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [agent.name for agent in scenario.everyone()]
        assert len(set(names)) == len(names)
        assert {turn.agent for turn in scenario.turns()} == set(names)


def test_few_cells_show_every_pair() -> None:
    found = [cell for cell in cells(DRIVERS) if cell.gap is None]
    enough = pairwise(found)
    chosen = [cell for cell in found if str(cell) in enough]
    for one, other in (("driver", "api"), ("api", "streaming"), ("driver", "form"), ("driver", "scenario")):
        pairs = {(str(getattr(cell, one)), str(getattr(cell, other))) for cell in found}
        assert {(str(getattr(cell, one)), str(getattr(cell, other))) for cell in chosen} == pairs
    assert len(chosen) < len(found) / 3
