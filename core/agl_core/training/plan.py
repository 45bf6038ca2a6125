"""Which rollouts training and evaluation make: a function of seed and place alone, so that a resumed run repeats it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from agl_core.protocols import TaskSource
from agl_core.types import Mode, Rollout, Task

_SHORT = {Mode.EVAL_GREEDY: "-greedy", Mode.EVAL_SAMPLED: "-sampled"}


def train_index(source: TaskSource, position: int, seed: int) -> int:
    """The task at a position (0, 1, …) of training: endless sources go on; finite ones are shuffled each epoch."""
    if source.size is None:
        return position
    return _shuffled(source.size, position // source.size, seed)[position % source.size]


def _shuffled(size: int, epoch: int, seed: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def plan_train_group(
    source: TaskSource, position: int, *, groups_per_step: int, size: int, seed: int, run: str, incarnation: int
) -> list[Rollout]:
    """The group at a position (0, 1, …) of training, made for the step that trains on it if none is late."""
    step, number = divmod(position, groups_per_step)
    return _group(
        source.task(train_index(source, position, seed)),
        f"s{step + 1}-g{number}",
        run=run,
        incarnation=incarnation,
        step=step + 1,
        mode=Mode.TRAIN,
        size=size,
    )


def plan_groups(
    source: TaskSource, indices: Iterable[int], *, run: str, incarnation: int, step: int, mode: Mode, split: str
) -> list[list[Rollout]]:
    """Evaluation's rollouts, one for each task: groups of one."""
    return [
        _group(
            source.task(index),
            f"s{step}-{split}{_SHORT[mode]}-g{number}",
            run=run,
            incarnation=incarnation,
            step=step,
            mode=mode,
            size=1,
        )
        for number, index in enumerate(indices)
    ]


def _group(task: Task, name: str, *, run: str, incarnation: int, step: int, mode: Mode, size: int) -> list[Rollout]:
    group = f"{name}-r{incarnation}" if incarnation else name
    return [
        Rollout(
            id=f"{group}-m{member}",
            run=run,
            incarnation=incarnation,
            group=group,
            task=task,
            mode=mode,
            step=step,
            member=member,
        )
        for member in range(size)
    ]
