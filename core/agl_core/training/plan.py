"""Which rollouts a step or an evaluation makes. A function of (seed, step) alone, so that a resumed run repeats it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from agl_core.protocols import TaskSource
from agl_core.types import Mode, Rollout

_SHORT = {Mode.TRAIN: "", Mode.EVAL_GREEDY: "-greedy", Mode.EVAL_SAMPLED: "-sampled"}


def train_indices(source: TaskSource, step: int, groups: int, seed: int) -> list[int]:
    """The tasks of a training step (1, 2, …): endless sources go on; finite ones are shuffled anew each epoch."""
    positions = range((step - 1) * groups, step * groups)
    if source.size is None:
        return list(positions)
    return [_shuffled(source.size, position // source.size, seed)[position % source.size] for position in positions]


def _shuffled(size: int, epoch: int, seed: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def plan_groups(
    source: TaskSource,
    indices: Iterable[int],
    *,
    run: str,
    incarnation: int,
    step: int,
    mode: Mode,
    split: str,
    size: int = 1,
) -> list[list[Rollout]]:
    """One group of `size` rollouts for each task."""
    suffix = f"-r{incarnation}" if incarnation else ""
    groups = []
    for number, index in enumerate(indices):
        task = source.task(index)
        group = f"s{step}{'' if mode.trains else f'-{split}'}{_SHORT[mode]}-g{number}{suffix}"
        groups.append(
            [
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
        )
    return groups
