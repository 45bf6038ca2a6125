"""What repeated evaluations say: pass@k and pass^k with their intervals, and two policies compared task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agl_core.training.evaluate import TaskScore
from agl_core.training.metrics import mean

_Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution: intervals are of 95%."""
_RESAMPLES = 10_000


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
class Change:
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
    gained: Sequence[Change]
    """Tasks that are solved now, or more often."""
    lost: Sequence[Change]
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

    >>> [round(each, 4) for each in wilson(0.5, 10)]
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
    found = []
    for held_out, mode, of_set in _by_set(scores):
        tries = len(of_set[0].rewards)
        if tries < 2:
            continue
        solved = [sum(reward >= success for reward in each.rewards) for each in of_set]
        for k in _counts(tries):
            at, every = (mean(estimate(k, tries, each) for each in solved) for estimate in (pass_at, pass_all))
            found.append(
                Passes(held_out, mode, k, len(of_set), tries, *(_over(len(of_set), each) for each in (at, every)))
            )
    return found


def compare(now: Sequence[TaskScore], before: Sequence[TaskScore], success: float) -> list[Comparison]:
    """Two evaluations, task by task, of each set and mode that both have; only tasks that both have count."""
    earlier = {(each.set, each.mode, each.task): each for each in before}
    found = []
    for held_out, mode, of_set in _by_set(now):
        pairs = [(each, earlier[key]) for each in of_set if (key := (each.set, each.mode, each.task)) in earlier]
        if not pairs:
            continue
        changes = [Change(new.task, old.solved(success), new.solved(success)) for new, old in pairs]
        gained = [each for each in changes if each.now > each.before]
        lost = [each for each in changes if each.now < each.before]
        differences = [mean(new.rewards) - mean(old.rewards) for new, old in pairs]
        p = sign_test(len(gained), len(lost))
        found.append(Comparison(held_out, mode, len(pairs), _bootstrap(differences), gained, lost, p))
    return found


def sign_test(gained: int, lost: int) -> float:
    """The two-sided exact sign test; without repeats it is McNemar's.

    >>> sign_test(5, 0), sign_test(3, 3)
    (0.0625, 1.0)
    """
    both = gained + lost
    tail = sum(math.comb(both, each) for each in range(min(gained, lost) + 1)) / (1 << both)
    return min(1.0, 2 * tail)


def _by_set(scores: Sequence[TaskScore]) -> list[tuple[str, str, list[TaskScore]]]:
    groups: dict[tuple[str, str], list[TaskScore]] = {}
    for each in scores:
        groups.setdefault((each.set, each.mode), []).append(each)
    return [(*key, of_set) for key, of_set in groups.items()]


def _counts(tries: int) -> list[int]:
    """1, 2, 4, … below the number of tries, and that."""
    return [*(2**power for power in range((tries - 1).bit_length())), tries]


def _over(tasks: int, value: float) -> Estimate:
    return Estimate(value, *wilson(min(max(value, 0.0), 1.0), tasks))


def _bootstrap(values: Sequence[float]) -> Estimate:
    """The mean, and the percentile interval of the means of samples drawn from the values; the same every time."""
    found = np.asarray(values)
    drawn = np.random.default_rng(0).integers(len(found), size=(_RESAMPLES, len(found)))
    low, high = np.quantile(found[drawn].mean(axis=1), (0.025, 0.975))
    return Estimate(float(found.mean()), float(low), float(high))
