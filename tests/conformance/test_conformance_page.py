"""The page says what the scenarios and the drivers say."""

from __future__ import annotations

from pathlib import Path

from .apart import APART
from .driver import CHAT, MESSAGES, RESPONSES
from .drivers import DRIVERS
from .page import render
from .scenarios import SCENARIOS


def test_the_page_is_up_to_date() -> None:
    here = Path(__file__).parent
    page = render(DRIVERS, APART, (here / "example_driver.py").read_text())
    assert (here.parents[1] / "docs" / "conformance.md").read_text() == page, "python -m tests.conformance.make_page"


def test_the_page_names_every_scenario_driver_and_gap() -> None:
    page = render(DRIVERS, APART, "")
    assert all(page.count(f"| {scenario.name} |") == 1 for scenario in SCENARIOS)
    for driver in (*DRIVERS, *APART):
        part = page.split(f"### {driver.name}\n")[1].split("###")[0]
        assert all(gap.reason in part for gap in driver.gaps)


def test_every_api_is_played_or_named_as_a_gap() -> None:
    for driver in (*DRIVERS, *APART):
        assert [*driver.apis, *driver.without] == [CHAT, RESPONSES, MESSAGES]


def test_scenarios_have_names_of_their_own_and_agents_known_by_their_prompts() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [agent.name for agent in scenario.everyone()]
        assert len(set(names)) == len(names)
        assert {turn.agent for turn in scenario.turns()} == set(names)
