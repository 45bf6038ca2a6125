"""Evaluation: the same agent, workers, gateway and store as training, in an evaluation mode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl_core.config.models import EvalSection
from agl_core.protocols import TaskSource
from agl_core.training.collect import Collector
from agl_core.training.metrics import episode_metrics
from agl_core.training.plan import plan_groups
from agl_core.training.progress import Observer
from agl_core.types import Mode


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policies being served on held-out sets of tasks."""

    collector: Collector
    sets: Mapping[str, TaskSource]
    settings: EvalSection
    run: str
    incarnation: int
    observer: Observer

    async def evaluate(self, step: int) -> tuple[list[dict[str, Any]], dict[str, float], int]:
        """Every set in every mode: the entries for the run's record, the metrics, and the LLM calls made."""
        entries: list[dict[str, Any]] = []
        metrics: dict[str, float] = {}
        calls = 0
        for name, source in self.sets.items():
            for mode in self.settings.modes:
                started = time.monotonic()
                count = min(self.settings.tasks, source.size or self.settings.tasks)
                groups = plan_groups(
                    source, range(count), run=self.run, incarnation=self.incarnation, step=step, mode=mode, split=name
                )
                with self.observer.phase(f"evaluation {name} {short(mode)}", step) as phase:
                    collected = await self.collector.collect(groups, phase)
                found = episode_metrics(collected.episodes)
                metrics |= {f"{name}/{short(mode)}/{key}": value for key, value in found.items()}
                calls += sum(len({t.key.call for t in e.transitions}) for e in collected.episodes)
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
        return entries, metrics, calls


def short(mode: Mode) -> str:
    """`greedy` or `sampled`."""
    return mode.value.removeprefix("eval-")
