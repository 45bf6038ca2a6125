"""The travel desk and its travellers; whole plays with real processes, in which bad versions are kept from users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from desk import TOOLS, search, solve
from flights import Wish
from make_online import search_airline, search_city
from play import Result, play
from users import NAMING_SHARE, Traveller, travellers

WISH = Wish("Rome", "Friday", "Kite")


async def test_the_desk_searches_as_the_model_asks_and_says_what_it_says(model: Any) -> None:
    model.replies = search_airline(WISH)[::2]
    assert await solve({"question": WISH.question}) == f"It costs {WISH.result}."
    [first, second] = model.requests
    assert [message["content"] for message in first["messages"]] == ["Find a fare.", WISH.question]
    assert first["tools"] == TOOLS
    assert second["messages"][-1]["content"] == f"fare {WISH.result}"


async def test_the_desk_gives_up(model: Any) -> None:
    model.replies = search_city(WISH)[:1]
    assert await solve({"question": WISH.question}) == "I could not find out."


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"query": 1}', '{"query": "Rome Oslo"}', '{"query": "Kite"}'])
def test_a_search_that_means_nothing_says_so(arguments: str) -> None:
    assert search(arguments).startswith("Error: ")


def crowd(seed: int, count: int = 2000, shift: int = 1000) -> list[Traveller]:
    return list(islice(travellers(seed, shift), count))


def test_wishes_shift_and_nothing_else_does() -> None:
    shifted, steady = crowd(0), crowd(0, shift=10_000)
    assert not any(user.wish.airline for user in [*shifted[:1000], *steady])
    assert sum(user.wish.airline is not None for user in shifted[1000:]) == pytest.approx(1000 * NAMING_SHARE, abs=50)
    for ours, theirs in zip(shifted, steady, strict=True):
        assert replace(ours, wish=replace(ours.wish, airline=None)) == theirs


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """Plays it in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda name: play(name, 1, None, ())


def learned(result: Result) -> list[dict[str, Any]]:
    """The decisions on versions that were learned."""
    return [d for d in result["decisions"] if d["version"]]


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_the_gate_stops_what_is_learned_from_feedback_that_is_turned_round(played: Callable[[str], Result]) -> None:
    result = played("inverted")
    states = {d["state"] for d in learned(result)}
    assert "rejected" in states
    assert states <= {"candidate", "rejected"}, "no version that was learned ever answered"
    assert mean(result["right"]) > 0.9


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_the_canary_stops_what_the_gate_cannot_see(played: Callable[[str], Result]) -> None:
    decisions = learned(played("unseen"))
    states = [d["state"] for d in decisions if d["version"] == decisions[0]["version"]]
    assert states == ["candidate", "passed", "canary", "rolled_back"]
    assert "stable" not in {d["state"] for d in decisions}
