"""The example's task source, as a plugin: `[tasks.train] source = "calc"`, `split = "train"`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from problems import Split, problem
from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core.registering import RegisterTaskSource
from agl_core.types import Task

HELD_OUT_SIZE = 200
HELD_OUT_SEED = 0
"""Held-out problems are the same in every run; training's depend on the run's seed."""


class CalcOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "calc"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Literal["train", "eval", "eval_templates"] = Field(description="Which problems to draw.")


@dataclass(frozen=True)
class CalcTasks:
    """Word problems of one split."""

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


def build(options: CalcOptions, folder: Path, seed: int) -> CalcTasks:
    """Arithmetic word problems, made as they are asked for."""
    return CalcTasks(Split(options.split), seed)


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("calc", build, options=CalcOptions)
