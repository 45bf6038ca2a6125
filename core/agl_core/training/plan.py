"""The plan of training: which task each group of rollouts is of, in turn, or drawn by its recorded success."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from agl_core.config.models import CurriculumSection
from agl_core.errors import ConfigError, nearest
from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.types import Episode, Mode, Rollout, Task

CANDIDATES = 16
"""Tasks that an endless source makes for each draw of a curriculum."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The groups of training, by position (0, 1, …).

    Without a curriculum they are of seed and position alone, so a resumed run repeats them. With one they also depend
    on what is known when they are begun (`Curriculum`).
    """

    source: TaskSource
    run: str
    restart: int
    seed: int
    groups_per_step: int
    group_size: int
    curriculum: Curriculum | None = None

    def group(self, position: int) -> list[Rollout]:
        """The rollouts of the group, as many as were recorded of a recorded task; for the step that should have it."""
        step, number = divmod(position, self.groups_per_step)
        if self.curriculum is None:
            index = train_index(self.source, position, self.seed)
        else:
            index = self.curriculum.draw(position)
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


def chances(success: Sequence[float], settings: CurriculumSection) -> list[float]:
    """The chance of each task to be drawn, given its success (0…1). They add up to 1.

    A chance is proportional to p (1 - p), the learnability of Rutherford et al. 2024 (arXiv 2408.15099), or 0 if the
    success p is not within `low` and `high`. The share `explore` of all draws ignores success; so do all draws if no
    task is left.
    """
    weights = [p * (1 - p) if settings.low <= p <= settings.high else 0.0 for p in success]
    total, alike = math.fsum(weights), 1 / len(success)
    if not total:
        return [alike] * len(success)
    return [settings.explore * alike + (1 - settings.explore) * weight / total for weight in weights]


@dataclass
class Curriculum:
    """Draws the tasks of training by their recorded success: more often those that are neither solved nor hopeless.

    A task's success is the mean reward of its groups, scaled to 0…1 by `reward`; the latest group counts half. Every
    task is tried once, in the order of a run without a curriculum, before any is drawn. With `by`, tasks with the same
    value of that metadata share their success, which is 0.5 at first; so an endless source can be drawn from, for each
    group by its next `CANDIDATES` tasks.

    A draw is of seed, position and `success`, which has the groups that were trained on, and is saved with the run's
    state. So where steps wait for their rollouts, a run that is resumed from a checkpoint draws exactly as it would
    have without the interruption. With `[async]`, groups that were under way are drawn again, by what the checkpoint
    knows; there, and with `train.refill`, draws depend on timing anyway.
    """

    settings: CurriculumSection
    source: TaskSource
    seed: int
    success: dict[str, float]
    """By task id, or by value of `by`. Changed in place."""
    _keys: list[str] = field(init=False)
    """Of the tasks of a finite source."""

    def __post_init__(self) -> None:
        """ConfigError if the tasks have no success to go by, or were recorded."""
        if isinstance(self.source, RecordedTasks):
            raise ConfigError(
                "[curriculum] chooses which tasks are run, but those of [tasks.train] were recorded, and all of them "
                "are trained on. Leave [curriculum] out."
            )
        if self.source.size is None and self.settings.by is None:
            raise ConfigError(
                "[curriculum]: [tasks.train] makes new tasks without end, so none of them comes again. Set "
                "curriculum.by to a key of their metadata whose values differ in difficulty, or choose a finite source."
            )
        self._keys = [self._key(self.source.task(index)) for index in range(self.source.size or 0)]

    def draw(self, position: int) -> int:
        """The index of the task for the group at this position."""
        size, by = self.source.size, self.settings.by
        if size is not None and by is None and position < size:
            return train_index(self.source, position, self.seed)
        first = position * CANDIDATES if size is None else 0
        candidates = range(first, first + (size or CANDIDATES))
        keys = self._keys or [self._key(self.source.task(index)) for index in candidates]
        success = [self.success.get(key, 0.5) for key in keys]
        rng = random.Random(f"{self.seed}:curriculum:{position}")
        return rng.choices(candidates, chances(success, self.settings))[0]

    def learn(self, episodes: Iterable[Episode]) -> dict[str, float]:
        """Take in complete groups, each whole and in a row; returns metrics.

        A group of which no reward is left counts as failed.
        """
        low, high = self.settings.reward
        for _, group in groupby(episodes, key=lambda episode: episode.group):
            members = list(group)
            rewards = [e.terminal for e in members if e.terminal is not None and math.isfinite(e.terminal)]
            mean = math.fsum(rewards) / len(rewards) if rewards else low
            latest = min(1.0, max(0.0, (mean - low) / (high - low)))
            key = self._key(members[0].task)
            self.success[key] = (self.success.get(key, latest) + latest) / 2
        known = self.success.values()
        return {
            "curriculum/success": math.fsum(known) / len(known),
            "curriculum/set_aside": float(sum(not self.settings.low <= p <= self.settings.high for p in known)),
        }

    def _key(self, task: Task) -> str:
        """The name by which a task's success is known. ConfigError if its metadata lack `by`."""
        if (by := self.settings.by) is None:
            return task.id
        if by not in task.metadata:
            raise ConfigError(
                f"[curriculum] by: the metadata of task {task.id} have no '{by}'. {nearest(by, task.metadata)}"
            )
        return str(task.metadata[by])
