"""The rollouts of training and evaluation: functions of seed and position alone, so a resumed run repeats them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.types import Mode, Rollout

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
    """The group at a position (0, 1, …) of training, made for the step that trains on it if none is late.

    It has `size` rollouts, or as many as were recorded of its task.
    """
    step, number = divmod(position, groups_per_step)
    index = train_index(source, position, seed)
    task = source.task(index)
    if isinstance(source, RecordedTasks):
        size = source.members(index)
    name = f"s{step + 1}-g{number}"
    return _group(Rollout("", run, restart, name, task, Mode.TRAIN, step + 1, 0, position=position), size)


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
    repeat: int = 1,
) -> list[list[Rollout]]:
    """Evaluation's rollouts, `repeat` for each task, the first task at `position` of the evaluation.

    Tasks that their source takes for those of training get the split `split`, the name of the held-out set. Each
    rollout is scored by itself, as a group of one; those of a task differ in their sampling seeds.
    """
    name = f"s{step}-{split}{_SHORT[mode]}"
    tasks = [source.task(index) for index in indices]
    tasks = [replace(task, split=split) if task.split == "train" else task for task in tasks]
    return [
        [rollout]
        for n, task in enumerate(tasks)
        for rollout in _group(
            Rollout("", run, restart, f"{name}-g{n}", task, mode, step, 0, position=position + n), repeat
        )
    ]


def plan_look(source: TaskSource, *, run: str, restart: int) -> list[Rollout]:
    """Rollouts of the first task of training that nothing is trained on."""
    first = Rollout("", run, restart, "s0-look", source.task(0), Mode.EVAL_SAMPLED, 0, 0, position=0)
    return _group(first, 3)


def _group(first: Rollout, size: int) -> list[Rollout]:
    """A group of rollouts that differ in id and member alone."""
    name = f"{first.group}-r{first.restart}" if first.restart else first.group
    return [replace(first, id=f"{name}-m{member}", group=name, member=member) for member in range(size)]
