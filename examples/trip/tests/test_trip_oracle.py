"""The oracle, against episodes whose truth is plain and against a search through all that could be done."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from behaviours import (
    Asks,
    Choice,
    add,
    answer,
    answer_briefly,
    ask_airline,
    ask_refund,
    ask_seat,
    calculate_words,
    guess,
    search_airline,
    search_city,
    search_everywhere,
    subtract,
)
from hypothesis import given
from hypothesis import strategies as st
from oracle import Effect, Reach, effects, mattered
from trip_tools import MOST_CALLS
from trips import Split, traveller, trip

from agl_core.types import Episode

NEARER, LOST, NONE = Effect.NEARER, Effect.OUT_OF_REACH, Effect.NONE
NAME = traveller(Split.TRAIN, 0, 0)
TRIP = trip(NAME)
Played = Callable[..., Episode]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((ask_airline, search_airline, ask_refund, subtract, answer), [NEARER] * 5),
        ((ask_refund, ask_airline, search_city, subtract, answer_briefly), [NEARER] * 5),
        ((ask_airline, search_airline, ask_refund, subtract, guess), [NEARER] * 4 + [LOST]),
        ((ask_airline, search_airline, ask_refund, add, answer), [NEARER] * 3 + [LOST, NONE]),
        ((ask_airline, search_airline, answer), [NEARER] * 2 + [LOST]),
        ((ask_airline, search_everywhere, search_airline, ask_refund, subtract), [NEARER, LOST, NONE, NONE, NONE]),
        ((ask_airline, ask_airline, search_airline, ask_refund, subtract), [NEARER, LOST, NONE, NONE, NONE]),
        ((search_everywhere, ask_airline, search_airline, ask_refund, subtract), [LOST] + [NONE] * 4),
        ((calculate_words, ask_airline, search_airline, ask_refund, subtract), [LOST] + [NONE] * 4),
        ((ask_seat, guess), [LOST, NONE]),
        ((guess,), [LOST]),
    ],
)
def test_what_each_call_did(played: Played, choices: tuple[Choice, ...], expected: list[Effect]) -> None:
    episode = played(NAME, TRIP, *choices)
    assert effects(episode) == expected
    assert mattered(episode) == [effect is not NONE for effect in expected]


def test_luck_counts_as_what_it_is(played: Played) -> None:
    """Who guesses the numbers right has the result, however that came about."""
    assert effects(played(NAME, TRIP, subtract, answer)) == [NEARER, NEARER]


TOLD: dict[Choice, str] = {ask_airline: "airline", ask_refund: "refund", search_airline: "fare", search_city: "fare"}
NEEDS: dict[Choice, set[str]] = {
    ask_airline: set(),
    ask_refund: set(),
    search_airline: {"airline"},
    subtract: {"airline", "refund", "fare"},
    answer: {"result"},
}
"""What a sensible assistant may do, and what it must have been told before."""


@cache
def can_win(known: frozenset[str], left: int) -> bool:
    """Whether some sequence of sensible calls ends with the right answer: by trying all of them."""
    for choice, needs in NEEDS.items():
        if left and needs <= known and (choice is answer or can_win(known | {TOLD.get(choice, "result")}, left - 1)):
            return True
    return False


CHOICES = [ask_airline, ask_refund, ask_seat, search_everywhere, search_airline, search_city, calculate_words, add]


@given(sequence=st.lists(st.sampled_from([*CHOICES, subtract]), max_size=MOST_CALLS))
def test_the_answer_is_within_reach_where_a_search_finds_a_way(sequence: list[Any]) -> None:
    reach, known = Reach(TRIP), frozenset[str]()
    for used, choice in enumerate(sequence, start=1):
        asked = choice(TRIP, "")
        assert isinstance(asked, Asks)
        reach = reach.after([(asked.tool, asked.text)], "")
        known |= {TOLD[choice]} if choice in TOLD else {"result"} if choice is subtract else set()
        assert reach.possible == can_win(known, MOST_CALLS - used)
