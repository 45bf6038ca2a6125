"""The beds' plugin: the task source `beds`, and the reward rules `earned` and `total`.

[tasks.train]                       [rewards.earned]
source = "beds"
bed = "additive"
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beds import MANY, WORDS, Bed, State, advantage, letter, outcomes
from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core.registering import RegisterTaskSource
from agl_core.types import Episode, Task, Transition

HELD_OUT_SIZE = 100


@agl_core.reward_rule
def earned(episode: Episode) -> Mapping[Any, float] | float:
    """What each call of `additive` earned by itself; the other games earn at their end alone."""
    if episode.task.input["bed"] != Bed.ADDITIVE:
        return float(episode.result)
    return {t.key: outcomes(state_of(episode, t), said(t))[0].reward for t in episode.transitions}


@agl_core.reward_rule
def total(episode: Episode) -> float:
    """What the whole game earned. Reported with weight 0, to compare games whose rewards come at different times."""
    found = earned(episode)
    return sum(found.values()) if isinstance(found, Mapping) else found


def true_credit(episode: Episode) -> list[float]:
    """What each call of an episode was worth, by the known chances and the habits before training."""
    return [advantage(state_of(episode, each), said(each)) for each in episode.transitions]


def state_of(episode: Episode, transition: Transition) -> State:
    """The game's state before a call, as the agent marked it."""
    return State(Bed(episode.task.input["bed"]), tuple(episode.task.input["words"]), **(transition.state or {}))


def said(transition: Transition) -> str:
    return letter(transition.response.get("content"))


class BedOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "beds"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bed: Bed = Field(description="Which game is played.")
    split: str = Field("train", description="The tasks' split; every other than train is the same in every run.")


@dataclass(frozen=True)
class BedTasks:
    """Words for games of one kind."""

    bed: Bed
    split: str
    seed: int

    @property
    def size(self) -> int | None:
        """Training's games have no end."""
        return None if self.split == "train" else HELD_OUT_SIZE

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self.split}/{self.seed if self.split == 'train' else 0}/{index}")
        words = rng.sample(WORDS, MANY[self.bed])
        return Task(f"{self.bed}-{self.split}-{index}", {"bed": self.bed, "words": words}, self.split)


def build(options: BedOptions, folder: Path, seed: int) -> BedTasks:
    """Games with words drawn by chance."""
    return BedTasks(options.bed, options.split, seed)


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("beds", build, options=BedOptions)
