"""The page says what the scenarios and the drivers say."""

from __future__ import annotations

from .apart import APART
from .driver import CHAT, MESSAGES, RESPONSES
from .drivers import DRIVERS
from .make_page import PAGE, render
from .scenarios import SCENARIOS


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "python -m tests.conformance.make_page"


def test_every_api_is_played_or_named_as_a_gap() -> None:
    for driver in (*DRIVERS, *APART):
        assert [*driver.apis, *driver.without] == [CHAT, RESPONSES, MESSAGES]


def test_scenarios_have_names_of_their_own_and_agents_known_by_their_prompts() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for scenario in SCENARIOS:
        names = [agent.name for agent in scenario.everyone()]
        assert len(set(names)) == len(names)
        assert {turn.agent for turn in scenario.turns()} == set(names)
