"""The example's plugin: the task source `trip`, and `memory_first`, a rate reported as a reward of weight 0.

[tasks.train]                       [rewards.memory_first]
source = "trip"                     weight = 0
split = "train"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oracle import first_tool
from pydantic import BaseModel, ConfigDict, Field
from trips import Split, traveller, trip

import agl_core
from agl_core.registering import RegisterTaskSource
from agl_core.types import Episode, Task

HELD_OUT_SIZE = 200
HELD_OUT_SEED = 0
"""Held-out trips are the same in every run; training's depend on the run's seed."""


@agl_core.reward_rule
def memory_first(episode: Episode) -> float:
    """1 if the first call asked memory."""
    return float(first_tool(episode) == "memory")


class TripOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "trip"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Literal["train", "eval"] = Field(description="Which trips to draw.")


@dataclass(frozen=True)
class TripTasks:
    """Cancelled flights of one split."""

    split: Split
    seed: int

    @property
    def size(self) -> int | None:
        """Training's trips have no end."""
        return None if self.split is Split.TRAIN else HELD_OUT_SIZE

    def task(self, index: int) -> Task:
        """The trip at this index. The model sees the question; the traveller's name leads the tools to the rest."""
        name = traveller(self.split, self.seed if self.split is Split.TRAIN else HELD_OUT_SEED, index)
        asked = trip(name)
        return Task(
            id=f"{self.split}-{index}",
            input={"question": asked.question, "traveller": name},
            split=self.split,
            metadata={"result": asked.result},
        )


def build(options: TripOptions, folder: Path, seed: int) -> TripTasks:
    """Cancelled flights, made as they are asked for."""
    return TripTasks(Split(options.split), seed)


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("trip", build, options=TripOptions)
