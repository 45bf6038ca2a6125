"""TextWorld's quests for `examples/beds/simulate.py`, which trains their player without a server."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from games import Game, State
from textworld_plugin import SEEDS

sys.path.append(str(Path(__file__).parents[1] / "beds"))
from beds import Outcome
from simulate import Rules


def draw(rng: random.Random, calls: int = 20, split: str = "train") -> Game:
    return Game(rng.choice(SEEDS[split]), calls=calls)


def turn(state: State, letter: str, rng: Any) -> Outcome:
    after = state.after(letter)
    return Outcome(1.0, float(after.won), None if after.over else after, "textworld", after.worked)  # type: ignore[arg-type]


RULES = Rules(Path(__file__).with_name("policy"), draw, State.first, turn, held_out={"split": "eval"})
