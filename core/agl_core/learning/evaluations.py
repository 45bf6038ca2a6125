"""Repeated evaluations: pass@k and pass^k with their intervals, and two policies compared task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

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
    """Of the mean reward; the interval is a bootstrap over the tasks."""
    gained: Sequence[TaskChange]
    """Tasks that are solved now, or more often."""
    lost: Sequence[TaskChange]
    """Tasks that are solved no longer, or less often."""
    p: float
    """By how small a chance as many or more of these would go one way, were both policies equally good (sign test)."""


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

    A rollout is solved if its reward is at least `success`. The intervals are over the tasks, whose number decides how
    much such a mean may vary: more repeats of few tasks say little about other tasks.
    """
    rows = []
    for (held_out, mode), of_set in _by_set(scores).items():
        tries = len(of_set[0].rewards)
        if tries < 2:
            continue
        solved = [sum(reward >= success for reward in task.rewards) for task in of_set]
        for k in [*(2**power for power in range((tries - 1).bit_length())), tries]:
            estimates = []
            for estimate in (pass_at, pass_all):
                value = fmean(estimate(k, tries, count) for count in solved)
                estimates.append(Estimate(value, *wilson(min(max(value, 0.0), 1.0), len(of_set))))
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
