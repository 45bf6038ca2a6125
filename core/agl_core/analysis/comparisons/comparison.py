"""Two evaluations on the same held-out tasks: what the later one solves, and what it lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from agl_core.analysis.rollouts import RolloutEntry, entries_of
from agl_core.store.interface import Store
from agl_core.types import Mode, Task


@dataclass(frozen=True, slots=True)
class TaskPair:
    """A task with its rollouts of both evaluations."""

    task: Task
    before: RolloutEntry
    after: RolloutEntry

    @property
    def change(self) -> float:
        """By how much its reward rose; a rollout without one counts as 0."""
        return (self.after.reward or 0.0) - (self.before.reward or 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tasks that both evaluations have."""

    better: Sequence[TaskPair]
    """The largest rise first."""
    worse: Sequence[TaskPair]
    """The largest fall first."""
    same: Sequence[TaskPair]
    unmatched: int
    """The number of tasks that only one of them has."""

    @property
    def means(self) -> tuple[float, float] | None:
        """The mean reward over these tasks before and after; None without any."""
        pairs = [*self.better, *self.worse, *self.same]
        if not pairs:
            return None
        before, after = ([getattr(p, which).reward or 0.0 for p in pairs] for which in ("before", "after"))
        return math.fsum(before) / len(pairs), math.fsum(after) / len(pairs)


async def evaluated(store: Store, step: int, mode: Mode) -> dict[bytes, RolloutEntry]:
    """The rollouts of an evaluation, by task; of a task that a restart evaluated again, the last one."""
    runs = {run.id for run in await store.runs()}
    found = await store.rollouts(step=step, mode=mode, run=runs.pop() if len(runs) == 1 else None)
    return {_key(entry.rollout.task): entry for entry in await entries_of(store, found)}


def compare(before: dict[bytes, RolloutEntry], after: dict[bytes, RolloutEntry]) -> Comparison:
    """Two evaluations, each as `evaluated` gives it."""
    pairs = [TaskPair(before[key].rollout.task, before[key], after[key]) for key in before if key in after]
    pairs.sort(key=lambda pair: pair.change, reverse=True)
    return Comparison(
        better=[pair for pair in pairs if pair.change > 0],
        worse=[pair for pair in reversed(pairs) if pair.change < 0],
        same=[pair for pair in pairs if pair.change == 0],
        unmatched=len(before.keys() ^ after.keys()),
    )


def _key(task: Task) -> bytes:
    return orjson.dumps([task.id, task.input], option=orjson.OPT_SORT_KEYS, default=str)
