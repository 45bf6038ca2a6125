"""The example's task source, as a plugin: `[tasks.train] source = "math"`, `split = "train"`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from math_problems import Split, problem
from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core.registering import RegisterTaskSource
from agl_core.types import Task

HELD_OUT_SIZE = 100
HELD_OUT_SEED = 0
"""Held-out problems are the same in every run; training's depend on the run's seed."""


class MathOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "math"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Split = Field(description="Which problems to draw.")


@dataclass(frozen=True)
class MathTasks:
    """Problems of one split."""

    split: Split
    seed: int

    @property
    def size(self) -> int | None:
        """Training's problems have no end."""
        return None if self.split is Split.TRAIN else HELD_OUT_SIZE

    def task(self, index: int) -> Task:
        """The problem at this index; its result is metadata, which the agent does not see."""
        seed = self.seed if self.split is Split.TRAIN else HELD_OUT_SEED
        asked = problem(self.split, seed, index)
        return Task(
            id=f"{self.split}-{index}",
            input={"question": asked.question},
            split=self.split,
            metadata={"result": asked.result},
        )


def build(options: MathOptions, folder: Path, seed: int) -> MathTasks:
    """Problems of several steps, made as they are asked for."""
    return MathTasks(options.split, seed)


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("math", build, options=MathOptions)
