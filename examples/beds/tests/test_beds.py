"""The beds: their chances, what a call is worth, and a game played against a scripted model."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest
from beds import CALLS, LETTERS, MANY, SKIP, WORDS, Bed, State, advantage, outcomes, right, shares, value


def start(bed: Bed) -> State:
    return State(bed, WORDS[: MANY[bed]])


def states(bed: Bed) -> Iterator[State]:
    """All that can follow from the start."""
    seen, todo = set(), [start(bed)]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += [o.after for letter in LETTERS for o in outcomes(state, letter) if o.after]
    return iter(seen)


@pytest.mark.parametrize("bed", Bed)
def test_chances_and_shares_add_up_and_habits_have_no_advantage(bed: Bed) -> None:
    for state in states(bed):
        assert sum(shares(state).values()) == pytest.approx(1)
        assert all(sum(o.chance for o in outcomes(state, letter)) == 1 for letter in LETTERS)
        habit = sum(share * advantage(state, letter) for letter, share in shares(state).items())
        assert habit == pytest.approx(0)
        if state.right is not None:
            assert max(LETTERS, key=lambda letter: advantage(state, letter)) == state.right or not value(state)


@pytest.mark.parametrize("bed", Bed)
def test_the_value_is_what_games_earn_on_average(bed: Bed) -> None:
    rng = random.Random(0)

    def game() -> float:
        state: State | None = start(bed)
        earned = 0.0
        while state is not None:
            [letter] = rng.choices(*zip(*shares(state).items(), strict=True))
            possible = outcomes(state, letter)
            [outcome] = rng.choices(possible, [o.chance for o in possible])
            earned, state = earned + outcome.reward, outcome.after
        return earned

    assert mean(game() for _ in range(4000)) == pytest.approx(value(start(bed)), abs=0.015)


@pytest.fixture
def play(model: Any) -> Any:
    """Plays a game against the scripted model."""
    player = importlib.reload(importlib.import_module("player"))
    return lambda bed: player.play({"bed": bed, "words": list(WORDS[: MANY[bed]])})


KEY, DOOR = right("key", WORDS[0]), right("door", WORDS[0])


@pytest.mark.parametrize(
    ("bed", "replies", "earned", "calls"),
    [
        (Bed.ADDITIVE, ["a"], 0, CALLS[Bed.ADDITIVE]),  # A rule gives the rewards of its calls.
        (Bed.DECISIVE, [KEY, "a", DOOR, "a"], 1, CALLS[Bed.DECISIVE]),
        (Bed.DECISIVE, [KEY, DOOR, "what?"], 0, CALLS[Bed.DECISIVE]),
        (Bed.RECOVERABLE, [SKIP], 0, MANY[Bed.RECOVERABLE]),
    ],
)
async def test_a_game_is_played_to_its_end(
    play: Any, model: Any, bed: Bed, replies: list[str], earned: float, calls: int
) -> None:
    model.replies = replies
    assert await play(bed) == earned
    assert len(model.first_messages) == calls
    assert model.first_messages[0] == start(bed).prompt


async def test_a_failing_tool_can_be_asked_again(play: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thing takes two calls here, so that the last of eight fetches the last of four."""
    turns = iter([0, 1] * 4)  # 0: the first of the outcomes, which is the failure.
    monkeypatch.setattr("player.random.choices", lambda possible, chances: [possible[-1 if next(turns) else 0]])
    model.replies = [right("get", word) for word in WORDS[:4] for _ in range(2)]
    assert await play(Bed.RECOVERABLE) == 1
    assert model.first_messages[:3] == [f"get {WORDS[0]} 0", f"retry {WORDS[0]} 1", f"get {WORDS[1]} 2"]
