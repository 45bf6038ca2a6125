"""Evaluations: the policies being served, on held-out sets of tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agl_core.config.models import EvalSection
from agl_core.protocols import TaskSource
from agl_core.training.alarms import Alarm
from agl_core.training.failures import common_failure, failures
from agl_core.training.metrics import Observer, episode_metrics
from agl_core.training.rollouts import Collector, group_of
from agl_core.types import Episode, Mode, Rollout


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The rewards of one held-out task in one mode, one for each of its rollouts."""

    set: str
    mode: str
    task: str
    rewards: tuple[float, ...]

    def solved(self, success: float) -> float:
        """The share of the rollouts whose reward is at least `success`."""
        return sum(reward >= success for reward in self.rewards) / len(self.rewards)


@dataclass(slots=True)
class Evaluated:
    """The outcome of an evaluation."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    """For the run's record, one for each set and mode."""
    metrics: dict[str, float] = field(default_factory=dict)
    scores: list[TaskScore] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    episodes: dict[str, Sequence[Episode]] = field(default_factory=dict)
    """By set and mode, as `eval/sampled`."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policies being served on held-out sets of tasks."""

    collector: Collector
    sets: Mapping[str, TaskSource]
    settings: EvalSection
    run: str
    restart: int
    observer: Observer

    async def evaluate(self, step: int, repeat: int = 1) -> Evaluated:
        """Every set in every mode, each task `repeat` times where it is sampled: greedy replies are always the same.

        The first evaluation raises an alarm if some rollouts failed, later ones only if all did.
        """
        evaluated, position = Evaluated(), 0
        for split in self.sets:
            for mode in self.settings.modes:
                tries = 1 if mode is Mode.EVAL_GREEDY else repeat
                groups = self.planned(step, split, mode, position, tries)
                position += len(groups) // tries
                await self._evaluate(evaluated, step, split, mode.value.removeprefix("eval-"), groups, tries)
        episodes = [episode for of_mode in evaluated.episodes.values() for episode in of_mode]
        if step == 0 or common_failure(episodes):
            alarm = await failures(self.collector.store, episodes)
            evaluated.alarms = [] if alarm is None else [alarm]
        return evaluated

    def planned(self, step: int, split: str, mode: Mode, position: int = 0, repeat: int = 1) -> list[list[Rollout]]:
        """`repeat` rollouts of each task of a set, the first task at `position` of the evaluation.

        Tasks that their source takes for those of training get the split `split`, the name of the held-out set. Each
        rollout is scored by itself, as a group of one; those of a task differ in their sampling seeds.
        """
        source, groups = self.sets[split], []
        for n in range(min(self.settings.tasks, source.size or self.settings.tasks)):
            task, name = source.task(n), f"s{step}-{split}-{mode.value.removeprefix('eval-')}-g{n}"
            task = replace(task, split=split) if task.split == "train" else task
            first = Rollout("", self.run, self.restart, name, task, mode, step, 0, position=position + n)
            groups += [[rollout] for rollout in group_of(first, repeat)]
        return groups

    async def _evaluate(
        self, evaluated: Evaluated, step: int, split: str, mode: str, groups: list[list[Rollout]], tries: int
    ) -> None:
        """Run the rollouts of one set in one mode, `tries` for each task; a task without a reward counts as 0."""
        started, name = time.monotonic(), f"{split}/{mode}"
        with self.observer.phase(f"evaluation {split} {mode}", step) as phase:
            episodes = await self.collector.collect(groups, phase)
        metrics = episode_metrics(episodes)
        evaluated.metrics |= {f"{name}/{key}": value for key, value in metrics.items()}
        evaluated.episodes[name] = episodes
        for first in range(0, len(episodes), tries):
            rewards = tuple(episode.terminal or 0.0 for episode in episodes[first : first + tries])
            evaluated.scores.append(TaskScore(split, mode, episodes[first].task.id, rewards))
        seconds = time.monotonic() - started
        evaluated.entries.append(
            {
                "step": step,
                "set": split,
                "mode": mode,
                "reward": metrics["reward/mean"],
                "rollouts": len(episodes),
                "calls": sum(len({t.key.call for t in episode.transitions}) for episode in episodes),
                "seconds": seconds,
            }
        )
