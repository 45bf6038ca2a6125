"""The example's plugin: the task source `wishes`, travellers' wishes with their right answers.

[tasks.eval]
source = "wishes"
names_airline = true
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flights import AIRLINES, CITIES, DAYS, Wish
from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core import kinds
from agl_core.kinds import Register
from agl_core.types import Task


class WishOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "wishes"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names_airline: bool = Field(description="Whether travellers name an airline.")


@dataclass(frozen=True)
class Wishes:
    """All wishes of one kind, in an order of the run's seed."""

    names_airline: bool
    seed: int

    @property
    def size(self) -> int:
        return len(self._wishes)

    @cached_property
    def _wishes(self) -> list[Wish]:
        airlines = AIRLINES if self.names_airline else (None,)
        found = [Wish(*each) for each in itertools.product(CITIES, DAYS, airlines)]
        random.Random(self.seed).shuffle(found)
        return found

    def task(self, index: int) -> Task:
        """The wish at this index."""
        wish = self._wishes[index]
        kind = "airline" if self.names_airline else "any"
        return Task(f"{kind}-{index}", {"question": wish.question}, metadata={"result": wish.result})


def build(options: WishOptions, folder: Path, seed: int) -> Wishes:
    """Wishes, made as they are asked for."""
    return Wishes(options.names_airline, seed)


@agl_core.hookimpl
def register_components(register: Register) -> None:
    register(kinds.TASK_SOURCE, "wishes", build, options=WishOptions)
