"""Evaluation: the same agent, workers, gateway and store as training, in an evaluation mode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl_core.config.models import EvalSection
from agl_core.protocols import TaskSource
from agl_core.store.interface import Store
from agl_core.training.cautions import common_failure, describe_failures
from agl_core.training.collect import Collector
from agl_core.training.metrics import episode_metrics
from agl_core.training.plan import plan_groups
from agl_core.training.report import Observer
from agl_core.types import Episode, Mode


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

    async def evaluate(self, step: int) -> tuple[list[dict[str, Any]], dict[str, float], int]:
        """Every set in every mode: the entries for the run's record, the metrics, and the LLM calls made.

        The first evaluation reports if some rollouts failed, later ones only if all did.
        """
        entries: list[dict[str, Any]] = []
        metrics: dict[str, float] = {}
        position = 0
        episodes: list[Episode] = []
        for name, source in self.sets.items():
            for mode in self.settings.modes:
                started = time.monotonic()
                count = min(self.settings.tasks, source.size or self.settings.tasks)
                groups = plan_groups(
                    source,
                    range(count),
                    run=self.run,
                    restart=self.restart,
                    step=step,
                    mode=mode,
                    split=name,
                    position=position,
                )
                position += count
                with self.observer.phase(f"evaluation {name} {short(mode)}", step) as phase:
                    collected = await self.collector.collect(groups, phase)
                found = episode_metrics(collected.episodes)
                metrics |= {f"{name}/{short(mode)}/{key}": value for key, value in found.items()}
                episodes += collected.episodes
                entries.append(
                    {
                        "step": step,
                        "set": name,
                        "mode": short(mode),
                        "reward": found["reward/mean"],
                        "rollouts": count,
                        "seconds": time.monotonic() - started,
                    }
                )
        if (step == 0 or common_failure(episodes)) and (failure := await describe_failures(self.store, episodes)):
            self.observer.say(f"step {step}, evaluation: {failure}")
        return entries, metrics, sum(len({t.key.call for t in e.transitions}) for e in episodes)


def short(mode: Mode) -> str:
    """`greedy` or `sampled`."""
    return mode.value.removeprefix("eval-")
