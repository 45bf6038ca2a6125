"""The beds' plugin: the task source `beds`, and the reward rule `earned`.

[tasks.train]                       [rewards.earned]
source = "beds"
things = 8
level = "swan"
"""

from __future__ import annotations

import random
from dataclasses import asdict

from beds import LEVELS, ROOMS, WORDS, Bed, Game

import agl_core
from agl_core.types import Episode, Task


@agl_core.reward_rule
def earned(episode: Episode) -> float:
    """The reward at the end of the game."""
    return float(episode.result or 0.0)


@agl_core.endless_task_source(held_out=200)
def beds(
    index: int,
    seed: int,
    *,
    bed: Bed = Bed.ERRAND,
    level: str = "swan",
    things: int = 8,
    calls: int = 20,
    wrong_ok: float = 0.0,
    farm: bool = False,
    luck: float = 0.0,
    split: str = "train",
) -> Task:
    """Games whose things, or first room, are drawn by chance."""
    game = draw(random.Random(f"{split}/{seed}/{index}"), bed, level, things, calls, wrong_ok, farm, luck)
    return Task(f"{bed}-{split}-{index}", asdict(game), split)


def draw(
    rng: random.Random,
    bed: Bed,
    level: str,
    things: int = 8,
    calls: int = 20,
    wrong_ok: float = 0.0,
    farm: bool = False,
    luck: float = 0.0,
) -> Game:
    if level not in LEVELS:
        raise ValueError(f"level is '{level}'; the levels are {', '.join(LEVELS)}")
    if bed is Bed.WALK:
        return Game(bed, level, calls=calls, luck=luck, start=rng.randrange(1, len(ROOMS) - 1))
    return Game(bed, level, tuple(rng.choices(WORDS, k=things)), calls, wrong_ok=wrong_ok, farm=farm, luck=luck)
