"""The games: their chances, what a call is worth, and a game played against a scripted model."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import pytest
from beds import BELL, LETTERS, ROOMS, SKIP, Bed, Game, State, Worth, habits, outcomes, right

ERRAND = Game(Bed.ERRAND, "lion", ("ant", "bee", "cat"), calls=7)
GAMES = {
    "errand": ERRAND,
    "farm": replace(ERRAND, farm=True),
    "misleading": replace(ERRAND, wrong_ok=0.9),
    "luck": replace(ERRAND, luck=0.5),
    "walk": Game(Bed.WALK, "lion", calls=14),
}
ANY = (*LETTERS, "", "ab", "what?")


def states(game: Game) -> Iterator[State]:
    """All that can follow from the start."""
    seen, todo = set[State](), [State.first(game)]
    while todo:
        if (state := todo.pop()) not in seen:
            seen.add(state)
            todo += [o.after for letter in LETTERS for o in outcomes(state, letter) if o.after]
    return iter(seen)


@pytest.mark.parametrize("name", GAMES)
def test_chances_add_up_habits_have_no_advantage_and_right_is_best(name: str) -> None:
    worth, matters = Worth(habits), 0
    for state in states(GAMES[name]):
        assert sum(habits(state).values()) == pytest.approx(1)
        assert all(sum(o.chance for o in outcomes(state, letter)) == pytest.approx(1) for letter in ANY)
        usual = sum(share * worth.advantage(state, letter) for letter, share in habits(state).items())
        assert usual == pytest.approx(0)
        advantages = {letter: worth.advantage(state, letter) for letter in LETTERS}
        if max(advantages.values()) > min(advantages.values()) + 1e-9:
            matters += 1
            assert [letter for letter, a in advantages.items() if a > max(advantages.values()) - 1e-9] == [right(state)]
    assert matters > 20
    lost = [outcomes(State.first(GAMES[name]), said)[0] for said in ("", "ab")]
    assert [(o.tool, o.chance) for o in lost] == [(None, 1)] * 2, "no letter of the game"


@pytest.mark.parametrize("name", GAMES)
def test_the_value_is_what_games_earn_on_average(name: str) -> None:
    rng, start = random.Random(0), State.first(GAMES[name])

    def game() -> float:
        state: State | None = start
        while state is not None:
            [letter] = rng.choices(*zip(*habits(state).items(), strict=True))
            possible = outcomes(state, letter)
            [outcome] = rng.choices(possible, [o.chance for o in possible])
            state = outcome.after
        return outcome.reward

    value = Worth(habits).value(start)
    assert 0.1 < value < 0.9
    assert fmean(game() for _ in range(4000)) == pytest.approx(value, abs=0.025)


def test_what_the_settings_change() -> None:
    start = State.first(ERRAND)
    wrong = next(letter for letter in "abc" if letter != right(start))
    [bell] = outcomes(State.first(GAMES["farm"]), BELL)
    assert (bell.tool, bell.works, bell.after) == (BELL, True, replace(State.first(GAMES["farm"]), turn=1))
    assert [o.tool for o in outcomes(start, BELL)] == [None]
    denied, praised = outcomes(State.first(GAMES["misleading"]), wrong)
    assert (denied.works, praised.works, praised.chance) == (False, True, 0.9)
    assert praised.after is not None
    assert praised.after.done == 0, "a wrong tool brings nothing, whatever it says"
    assert [o.works for o in outcomes(start, wrong)] == [False]
    value, with_luck = (Worth(habits).value(State.first(GAMES[name])) for name in ("errand", "luck"))
    assert with_luck == pytest.approx(0.5 * value + 0.5 / 2)


@pytest.fixture
def play(model: Any) -> Any:
    """Plays a game against the scripted model."""
    player = importlib.reload(importlib.import_module("player"))
    return lambda game: player.play(asdict(game))


SURE = replace(ERRAND, flaky=0.0)
STEPS = [right(State.first(replace(SURE, words=(word,)))) for word in SURE.words]


THINGS = ["get ant", "get bee", "get cat"]
WAY = [*("take " + room for room in ROOMS[3::-1]), *("open " + room for room in ROOMS)]


@pytest.mark.parametrize(
    ("game", "replies", "earned", "asked"),
    [
        (SURE, STEPS, 1, THINGS),
        (SURE, [SKIP, *STEPS[1:]], 0, THINGS),
        (SURE, ["what?", *STEPS], 1, ["get ant", *THINGS]),
        (replace(SURE, flaky=1.0), STEPS, 0, ["get ant"] + ["retry ant"] * 6),
        (GAMES["walk"], [*"aaacbbbbbbd"], 1, WAY),
        (GAMES["walk"], ["b"], 0, ["take den", "take hall", "take kitchen"] + ["take loft"] * 11),
    ],
    ids=["won", "skipped", "a lost call", "always fails", "walked", "lost its way"],
)
async def test_a_game_is_played_to_its_end(
    play: Any, model: Any, game: Game, replies: list[str], earned: float, asked: list[str]
) -> None:
    model.replies = replies
    assert await play(game) == earned
    assert model.first_messages == [f"lion {prompt}" for prompt in asked]
