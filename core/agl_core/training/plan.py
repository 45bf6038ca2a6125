"""The plan of training: which task each group of rollouts is of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.types import Mode, Rollout


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The groups of training, by position (0, 1, …): of seed and position alone, so a resumed run repeats them."""

    source: TaskSource
    run: str
    restart: int
    seed: int
    groups_per_step: int
    group_size: int

    def group(self, position: int) -> list[Rollout]:
        """The rollouts of the group, as many as were recorded of a recorded task; for the step that should have it."""
        step, number = divmod(position, self.groups_per_step)
        index = train_index(self.source, position, self.seed)
        size = self.source.members(index) if isinstance(self.source, RecordedTasks) else self.group_size
        task, name = self.source.task(index), f"s{step + 1}-g{number}"
        return group_of(
            Rollout("", self.run, self.restart, name, task, Mode.TRAIN, step + 1, 0, position=position), size
        )


def train_index(source: TaskSource, position: int, seed: int) -> int:
    """The task at a position of training: endless sources continue; finite ones are shuffled each epoch."""
    if source.size is None:
        return position
    epoch, index = divmod(position, source.size)
    return _order(source.size, f"{seed}:{epoch}")[index]


@lru_cache(maxsize=2)  # Two epochs meet in a step; to shuffle 100,000 tasks takes as long as a small step.
def _order(size: int, seed: str) -> Sequence[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order


def group_of(first: Rollout, size: int) -> list[Rollout]:
    """A group of rollouts that differ in id and member alone."""
    name = f"{first.group}-r{first.restart}" if first.restart else first.group
    return [replace(first, id=f"{name}-m{member}", group=name, member=member) for member in range(size)]
