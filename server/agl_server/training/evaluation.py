"""Evaluation on held-out sets: rollouts scored as in training, likelihood of recorded replies, pass@k, comparisons."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from agl_core.config.models import EvalSection
from agl_core.errors import ConfigError
from agl_core.learning.batch import BatchPlan, filter_trainable, make_batches
from agl_core.protocols import TaskSource
from agl_core.types import Batch, Episode, Mode, Rollout, scored_return
from agl_server.health.alarms import alarm_of_failures
from agl_server.health.rollouts import episode_metrics
from agl_server.health.table import Alarm
from agl_server.health.verdict import LOSS
from agl_server.training.metrics import Observer
from agl_server.training.recorded import Recordings
from agl_server.training.rollouts import Collector, group_of, trained_episode

_Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution: intervals are of 95%."""
_RESAMPLES = 10_000


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
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Passes:
    """How often the tasks of one set are solved, in one mode."""

    set: str
    mode: str
    k: int
    tasks: int
    repeats: int
    pass_at: Estimate
    """The probability that at least one of k tries solves a task."""
    pass_all: Estimate
    """pass^k: the probability that all k tries do."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """A task that two policies solve unequally often."""

    task: str
    before: float
    """The share of its rollouts that were solved."""
    now: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy against another on the tasks that both were evaluated on, in one set and mode."""

    set: str
    mode: str
    tasks: int
    difference: Estimate
    """The change of the mean reward; the interval is a bootstrap over the tasks."""
    gained: Sequence[TaskChange]
    """Tasks that are solved now, or more often."""
    lost: Sequence[TaskChange]
    """Tasks that are solved no longer, or less often."""
    p: float
    """The chance of so one-sided a result, or more so, were both policies equally good (sign test)."""


def pass_at(k: int, tries: int, solved: int) -> float:
    """The unbiased estimate of pass@k of a task of which `solved` of `tries` rollouts were (arXiv 2107.03374, eq. 1).

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1)
    (0.25, 0.5)
    """
    return 1 - math.comb(tries - solved, k) / math.comb(tries, k)


def pass_all(k: int, tries: int, solved: int) -> float:
    """The unbiased estimate of pass^k: that all of k tries solve the task (arXiv 2406.12045, section 3).

    >>> pass_all(1, 4, 2), pass_all(2, 4, 2)
    (0.5, 0.16666666666666666)
    """
    return math.comb(solved, k) / math.comb(tries, k)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of the mean of `count` values that are 0 or 1; of values between, it is wider than needed.

    >>> [round(bound, 4) for bound in wilson(0.5, 10)]
    [0.2366, 0.7634]
    """
    spread = _Z**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def passes(scores: Sequence[TaskScore], success: float) -> list[Passes]:
    """pass@k and pass^k of each set and mode whose tasks were repeated, for k = 1, 2, 4, … and all tries.

    The intervals are over the tasks: more repeats of few tasks say little about other tasks.
    """
    rows = []
    for (held_out, mode), of_set in _by_set(scores).items():
        tries = len(of_set[0].rewards)
        if tries < 2:
            continue
        solved = [sum(reward >= success for reward in task.rewards) for task in of_set]
        for k in [*(2**power for power in range((tries - 1).bit_length())), tries]:
            shares = (fmean(estimate(k, tries, count) for count in solved) for estimate in (pass_at, pass_all))
            estimates = [Estimate(share, *wilson(share, len(of_set))) for share in shares]
            rows.append(Passes(held_out, mode, k, len(of_set), tries, *estimates))
    return rows


def compare(now: Sequence[TaskScore], before: Sequence[TaskScore], success: float) -> list[Comparison]:
    """Two evaluations, task by task, of each set and mode that both have; only tasks that both have count."""
    earlier = {(score.set, score.mode, score.task): score for score in before}
    comparisons = []
    for (held_out, mode), of_set in _by_set(now).items():
        pairs = [(new, earlier[key]) for new in of_set if (key := (new.set, new.mode, new.task)) in earlier]
        if not pairs:
            continue
        changes = [TaskChange(new.task, old.solved(success), new.solved(success)) for new, old in pairs]
        gained = [change for change in changes if change.now > change.before]
        lost = [change for change in changes if change.now < change.before]
        difference = _bootstrap([fmean(new.rewards) - fmean(old.rewards) for new, old in pairs])
        p = sign_test(len(gained), len(lost))
        comparisons.append(Comparison(held_out, mode, len(pairs), difference, gained, lost, p))
    return comparisons


def sign_test(gained: int, lost: int) -> float:
    """The two-sided exact sign test; without repeats it is McNemar's.

    >>> sign_test(5, 0), sign_test(3, 3)
    (0.0625, 1.0)
    """
    both = gained + lost
    tail = sum(math.comb(both, fewer) for fewer in range(min(gained, lost) + 1)) / (1 << both)
    return min(1.0, 2 * tail)


def _by_set(scores: Sequence[TaskScore]) -> dict[tuple[str, str], list[TaskScore]]:
    groups: dict[tuple[str, str], list[TaskScore]] = {}
    for score in scores:
        groups.setdefault((score.set, score.mode), []).append(score)
    return groups


def _bootstrap(values: Sequence[float]) -> Estimate:
    """The mean, and the percentile interval of the means of samples drawn from the values; the same every time."""
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(axis=1), (0.025, 0.975))
    return Estimate(float(np.mean(values)), float(low), float(high))


@dataclass
class HeldOutReplies:
    """A held-out set of recorded rollouts: the likelihood of trained agents' replies is measured, and no agent runs."""

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
        keep = config.train.housekeeping
        groups = [[trained_episode(await self.recordings.adopt(it, it.rollout), keep)] for it in recorded]
        made = make_batches(groups, BatchPlan({}, config.train.agents, without_logprobs=True))
        return {
            policy: usable
            for policy, batch in made.batches.items()
            if len(usable := filter_trainable(batch, context_length=self.context_length).batch)
        }


@dataclass(slots=True)
class Evaluation:
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
    collector: Collector
    sets: Mapping[str, TaskSource]
    settings: EvalSection
    run: str
    restart: int
    observer: Observer
    replies: Sequence[HeldOutReplies] = ()
    """The held-out sets that are recorded."""

    async def evaluate(self, step: int, repeat: int = 1) -> Evaluation:
        """Every set in every mode, each task `repeat` times where it is sampled: greedy replies are always the same.

        The first evaluation raises an alarm if some rollouts failed, later ones only if all did.
        """
        evaluated, position = Evaluation(), 0
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

        Tasks of the split "train" get that of the held-out set. Each rollout is scored as a group of one.
        """
        source, groups = self.sets[split], []
        for n in range(min(self.settings.tasks, source.size or self.settings.tasks)):
            task, name = source.task(n), f"s{step}-{split}-{mode.value.removeprefix('eval-')}-g{n}"
            task = replace(task, split=split) if task.split == "train" else task
            first = Rollout("", self.run, self.restart, name, task, mode, step, 0, position=position + n)
            groups += [[rollout] for rollout in group_of(first, repeat)]
        return groups

    async def _evaluate(
        self, evaluated: Evaluation, step: int, split: str, mode: str, groups: list[list[Rollout]], tries: int
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
        sampled = sum(len(t.response_ids) for e in episodes for t in e.transitions if t.response_ids is not None)
        entry = {"reward": metrics["reward/mean"], "rollouts": len(episodes), "calls": calls, "tokens": sampled}
        evaluated.add(name, metrics, {"step": step, "set": split, "mode": mode, **entry}, started)

    async def _measure(self, evaluated: Evaluation, step: int, replies: HeldOutReplies) -> None:
        started = time.monotonic()
        with self.observer.phase(f"evaluation {replies.name}", step) as advance:
            measured = await replies.measure()
            advance(1.0, f"loss {measured['loss']:.3f}")
        entry = {"step": step, "set": replies.name, "mode": LOSS, **measured}
        evaluated.add(replies.name, measured, entry, started)
