"""The rollouts of training and evaluation: functions of seed and position alone, so a resumed run repeats them."""

from __future__ import annotations

import random
from collections.abc import Iterable

from agl_core.protocols import TaskSource
from agl_core.types import Mode, Rollout, Task

_SHORT = {Mode.EVAL_GREEDY: "-greedy", Mode.EVAL_SAMPLED: "-sampled"}


def train_index(source: TaskSource, position: int, seed: int) -> int:
    """The task at a position (0, 1, …) of training: endless sources continue; finite ones are shuffled each epoch."""
    if source.size is None:
        return position
    return _shuffled(source.size, position // source.size, seed)[position % source.size]


def _shuffled(size: int, epoch: int, seed: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def plan_train_group(
    source: TaskSource, position: int, *, groups_per_step: int, size: int, seed: int, run: str, restart: int
) -> list[Rollout]:
    """The group at a position (0, 1, …) of training, made for the step that trains on it if none is late."""
    step, number = divmod(position, groups_per_step)
    return _group(
        source.task(train_index(source, position, seed)),
        f"s{step + 1}-g{number}",
        run=run,
        restart=restart,
        step=step + 1,
        mode=Mode.TRAIN,
        position=position,
        size=size,
    )


def plan_groups(
    source: TaskSource,
    indices: Iterable[int],
    *,
    run: str,
    restart: int,
    step: int,
    mode: Mode,
    split: str,
    position: int,
) -> list[list[Rollout]]:
    """Evaluation's rollouts, one for each task: groups of one, the first of them at `position` of the evaluation."""
    return [
        _group(
            source.task(index),
            f"s{step}-{split}{_SHORT[mode]}-g{number}",
            run=run,
            restart=restart,
            step=step,
            mode=mode,
            position=position + number,
            size=1,
        )
        for number, index in enumerate(indices)
    ]


def _group(
    task: Task, name: str, *, run: str, restart: int, step: int, mode: Mode, position: int, size: int
) -> list[Rollout]:
    group = f"{name}-r{restart}" if restart else name
    return [
        Rollout(
            id=f"{group}-m{member}",
            run=run,
            restart=restart,
            group=group,
            task=task,
            mode=mode,
            step=step,
            member=member,
            position=position,
        )
        for member in range(size)
    ]
