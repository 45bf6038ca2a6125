"""The beds' plugin: the task source `beds`, and the reward rules `earned` and `total`.

[tasks.train]                       [rewards.earned]
source = "beds"
bed = "additive"
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from beds import MANY, WORDS, Bed, State, advantage, letter, outcomes

import agl_core
from agl_core.types import Episode, Task, Transition


@agl_core.reward_rule
def earned(episode: Episode) -> Mapping[Any, float] | float:
    """The earnings of each call of `additive`; the other games earn at their end alone."""
    if episode.task.input["bed"] != Bed.ADDITIVE:
        return float(episode.result)
    return {t.key: outcomes(state_of(episode, t), said(t))[0].reward for t in episode.transitions}


@agl_core.reward_rule
def total(episode: Episode) -> float:
    """Earnings of the whole game. Reported with weight 0, to compare games whose rewards come at different times."""
    found = earned(episode)
    return sum(found.values()) if isinstance(found, Mapping) else found


def true_credit(episode: Episode) -> list[float]:
    """The worth of each call of an episode, by the known chances and the habits before training."""
    return [advantage(state_of(episode, each), said(each)) for each in episode.transitions]


def state_of(episode: Episode, transition: Transition) -> State:
    """The game's state before a call, as the agent marked it."""
    return State(Bed(episode.task.input["bed"]), tuple(episode.task.input["words"]), **(transition.state or {}))


def said(transition: Transition) -> str:
    return letter(transition.response.get("content"))


@agl_core.endless_task_source(held_out=100)
def beds(index: int, seed: int, *, bed: Bed, split: str = "train") -> Task:
    """Games with words drawn by chance."""
    words = random.Random(f"{split}/{seed}/{index}").sample(WORDS, MANY[bed])
    return Task(f"{bed}-{split}-{index}", {"bed": bed, "words": words}, split)
