"""Evaluation: the same agent, workers, gateway and store as training, in an evaluation mode."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_core.config.models import EvalSection
from agl_core.protocols import TaskSource
from agl_core.store.interface import Store
from agl_core.training.alarms import Alarm
from agl_core.training.alarms.rollouts import common_failure, failures
from agl_core.training.metrics import episode_metrics
from agl_core.training.progress import Observer
from agl_core.training.rollouts.collect import Collector
from agl_core.training.rollouts.plan import plan_groups
from agl_core.types import Episode, Mode


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


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found."""

    entries: list[dict[str, Any]]
    """For the run's record, one for each set and mode."""
    metrics: dict[str, float]
    calls: int
    """LLM calls made."""
    scores: list[TaskScore]
    alarms: list[Alarm]
    episodes: Mapping[str, Sequence[Episode]] = field(default_factory=dict)
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
    store: Store

    async def evaluate(self, step: int, repeat: int = 1) -> Evaluated:
        """Every set in every mode, each task `repeat` times where it is sampled: greedy replies are always the same.

        The first evaluation raises an alarm if some rollouts failed, later ones only if all did.
        """
        entries: list[dict[str, Any]] = []
        metrics: dict[str, float] = {}
        position = 0
        episodes: dict[str, list[Episode]] = {}
        scores: list[TaskScore] = []
        for name, source in self.sets.items():
            for mode in self.settings.modes:
                started = time.monotonic()
                count = min(self.settings.tasks, source.size or self.settings.tasks)
                tries = 1 if mode is Mode.EVAL_GREEDY else repeat
                groups = plan_groups(
                    source,
                    range(count),
                    run=self.run,
                    restart=self.restart,
                    step=step,
                    mode=mode,
                    split=name,
                    position=position,
                    repeat=tries,
                )
                position += count
                with self.observer.phase(f"evaluation {name} {short(mode)}", step) as phase:
                    collected = await self.collector.collect(groups, phase)
                found = episode_metrics(collected.episodes)
                metrics |= {f"{name}/{short(mode)}/{key}": value for key, value in found.items()}
                episodes[f"{name}/{short(mode)}"] = collected.episodes
                scores += _scores(name, short(mode), collected.episodes, tries)
                entries.append(
                    {
                        "step": step,
                        "set": name,
                        "mode": short(mode),
                        "reward": found["reward/mean"],
                        "rollouts": count * tries,
                        "seconds": time.monotonic() - started,
                    }
                )
        every = [each for found in episodes.values() for each in found]
        alarm = await failures(self.store, every) if step == 0 or common_failure(every) else None
        calls = sum(len({t.key.call for t in e.transitions}) for e in every)
        return Evaluated(entries, metrics, calls, scores, [] if alarm is None else [alarm], episodes)


def _scores(held_out: str, mode: str, episodes: Sequence[Episode], tries: int) -> list[TaskScore]:
    """The scores of episodes in the order of their tasks; without a terminal reward it is 0, as in the metrics."""
    tasks = [episodes[first : first + tries] for first in range(0, len(episodes), tries)]
    return [
        TaskScore(held_out, mode, of_task[0].task.id, tuple(each.terminal or 0.0 for each in of_task))
        for of_task in tasks
    ]


def short(mode: Mode) -> str:
    """`greedy` or `sampled`."""
    return mode.value.removeprefix("eval-")
