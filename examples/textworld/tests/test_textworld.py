"""TextWorld's quests against TextWorld's own environment, and a quest played against a scripted model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textworld.generator", reason="it brings spaCy: make textworld installs it and runs this")
import textworld
from games import Game, State, _make
from textworld_plugin import quests


def letter(state: State, command: str) -> str:
    return next(letter for letter, name in state.letters.items() if name == command)


@pytest.mark.parametrize("seed", [0, 1, 1000])
def test_a_game_is_won_by_its_walkthrough_and_not_before(seed: int) -> None:
    state = State.first(Game(seed))
    for command in state.game.quest.walkthrough:
        assert not state.over
        state = state.after(letter(state, command))
        assert state.worked
    assert state.won
    assert state.over


@pytest.mark.parametrize("seed", [2, 1001])
def test_commands_and_wins_are_those_of_textworlds_own_environment(seed: int, tmp_path: Path) -> None:
    game, rng = Game(seed), random.Random(seed)
    game.quest.save(str(tmp_path / "game.json"))
    environment = textworld.start(str(tmp_path / "game.json"))
    for walkthrough in ([], game.quest.walkthrough):
        theirs, ours = environment.reset(), State.first(game)
        commands = [*walkthrough]
        while not ours.over:
            assert [*ours.commands] == theirs.admissible_commands
            command = commands.pop(0) if commands else rng.choice(theirs.admissible_commands)
            theirs, _, _ = environment.step(command)
            ours = ours.after(letter(ours, command))
            assert ours.won == theirs.won
            assert ours.facts == frozenset(theirs["_facts"])


def test_commands_that_change_nothing_and_letters_of_no_command_did_not_work() -> None:
    state = State.first(Game(0))
    for said in (letter(state, "look"), letter(state, "inventory"), "Z", "", "what?"):
        after = state.after(said)
        assert not after.worked
        assert (after.facts, after.turn) == (state.facts, 1)
    assert state.after(letter(state, state.game.quest.walkthrough[0])).worked


def test_the_same_seed_is_the_same_game_and_held_out_seeds_are_others() -> None:
    first = State.first(Game(3)).prompt
    _make.cache_clear()
    assert State.first(Game(3)).prompt == first
    train, held_out = ({task.input["seed"] for task in quests(split=split)} for split in ("train", "eval"))
    assert not train & held_out
    assert len({State.first(Game(seed)).prompt for seed in range(10)}) > 5


@pytest.mark.parametrize(("won", "calls"), [(True, 20), (False, 7)])
async def test_the_player_wins_by_the_walkthrough_if_there_are_calls_enough(model: Any, won: bool, calls: int) -> None:
    from adventurer import play

    state = State.first(Game(0))
    for command in state.game.quest.walkthrough:
        model.replies.append(letter(state, command))
        state = state.after(model.replies[-1])
    assert await play({"seed": 0, "calls": calls}) == won
    assert model.first_messages[0] == State.first(Game(0)).prompt
    assert len(model.first_messages) == (len(model.replies) if won else calls)
