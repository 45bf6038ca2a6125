"""Evaluation: rollouts of held-out sets, scored as in training, and the likelihood of replies that are recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from agl_core.config.models import EvalSection
from agl_core.errors import ConfigError
from agl_core.health.alarms import alarm_of_failures
from agl_core.health.rollouts import episode_metrics
from agl_core.health.table import Alarm
from agl_core.health.verdict import LOSS
from agl_core.learning.batch import NO_CREDIT, BatchPlan, filter_trainable, make_batches
from agl_core.learning.evaluations import TaskScore
from agl_core.learning.transitions import episode_of
from agl_core.protocols import TaskSource
from agl_core.training.metrics import Observer
from agl_core.training.recorded import Recordings
from agl_core.training.rollouts import Collector, group_of
from agl_core.types import Batch, Episode, Mode, Rollout, scored_return


@dataclass
class HeldOutReplies:
    """A held-out set of recorded rollouts. No agent runs for it: the likelihood of its replies is measured.

    The calls of trained agents count, in the rollouts of as many tasks as an evaluation has.
    """

    name: str
    recordings: Recordings
    context_length: int | None
    _batches: Mapping[str, Batch] | None = field(default=None, init=False)
    """By policy; None as long as they were not read."""

    async def measure(self) -> dict[str, float]:
        """loss (nats per response token), accuracy (the share of tokens that are the most likely ones; absent if an
        engine does not know), and the tokens that count, all under the weights as they are. ConfigError without any."""
        if self._batches is None:
            self._batches = await self._read()
        nats = 0.0
        tokens, hits, knows = 0, 0, True
        for policy, batch in self._batches.items():
            scores = await self.recordings.engine.logprobs(policy, batch)
            is_scored_R = batch.mask_R & ~np.isnan(scores.logprobs_R)
            nats -= float(scores.logprobs_R[is_scored_R].sum())
            tokens += int(is_scored_R.sum())
            knows = knows and scores.is_top_R is not None
            hits += 0 if scores.is_top_R is None else int(scores.is_top_R[is_scored_R].sum())
        if not tokens:
            raise ConfigError(
                f"[tasks.{self.name}]: none of the recorded calls can be scored. Those of the agents in train.agents "
                f"count, if their texts can be tokenised, and fit into the model's context."
            )
        return {"loss": nats / tokens, **({"accuracy": hits / tokens} if knows else {}), "tokens": float(tokens)}

    async def _read(self) -> dict[str, Batch]:
        config, source = self.recordings.config, self.recordings.source
        recorded = chain.from_iterable(await source.groups(range(min(config.eval.tasks, source.size))))
        groups = [[episode_of(await self.recordings.adopt(it, it.rollout))] for it in recorded]
        credit = dict.fromkeys(config.policies, NO_CREDIT)
        made = make_batches(groups, BatchPlan(credit, config.train.agents, without_logprobs=True))
        return {
            policy: usable
            for policy, batch in made.batches.items()
            if len(usable := filter_trainable(batch, context_length=self.context_length).batch)
        }


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

    def add(self, where: str, metrics: Mapping[str, float], entry: Mapping[str, Any], started: float) -> None:
        """Take the numbers of one set and mode, whose evaluation `started` then."""
        self.metrics |= {f"{where}/{key}": value for key, value in metrics.items()}
        self.entries.append({**entry, "seconds": time.monotonic() - started})


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policies being served on held-out sets of tasks."""

    collector: Collector
    sets: Mapping[str, TaskSource]
    settings: EvalSection
    run: str
    restart: int
    observer: Observer
    replies: Sequence[HeldOutReplies] = ()
    """The held-out sets that are recorded."""

    async def evaluate(self, step: int, repeat: int = 1) -> Evaluated:
        """Every set in every mode, each task `repeat` times where it is sampled: greedy replies are always the same.

        Of recorded sets the loss of the replies is measured.
        The first evaluation raises an alarm if some rollouts failed, later ones only if all did.
        """
        evaluated, position = Evaluated(), 0
        for split in self.sets:
            for mode in self.settings.modes:
                tries = 1 if mode is Mode.EVAL_GREEDY else repeat
                groups = self.planned(step, split, mode, position, tries)
                position += len(groups) // tries
                await self._evaluate(evaluated, step, split, mode.value.removeprefix("eval-"), groups, tries)
        for replies in self.replies:
            await self._measure(evaluated, step, replies)
        episodes = [episode for of_mode in evaluated.episodes.values() for episode in of_mode]
        alarm = await alarm_of_failures(self.collector.store, episodes, common=step > 0)
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
        with self.observer.phase(f"evaluation {split} {mode}", step) as advance:
            episodes = await self.collector.collect(groups, advance)
        metrics = episode_metrics(episodes)
        evaluated.episodes[name] = episodes
        for first in range(0, len(episodes), tries):
            rewards = tuple(scored_return(episode) or 0.0 for episode in episodes[first : first + tries])
            evaluated.scores.append(TaskScore(split, mode, episodes[first].task.id, rewards))
        calls = sum(len({t.key.call for t in episode.transitions}) for episode in episodes)
        entry = {"reward": metrics["reward/mean"], "rollouts": len(episodes), "calls": calls}
        evaluated.add(name, metrics, {"step": step, "set": split, "mode": mode, **entry}, started)

    async def _measure(self, evaluated: Evaluated, step: int, replies: HeldOutReplies) -> None:
        started = time.monotonic()
        with self.observer.phase(f"evaluation {replies.name}", step) as advance:
            measured = await replies.measure()
            advance(1.0, f"loss {measured['loss']:.3f}")
        entry = {"step": step, "set": replies.name, "mode": LOSS, **measured}
        evaluated.add(replies.name, measured, entry, started)
