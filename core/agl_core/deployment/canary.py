"""Whether a canary is as good as the stable version, by the rewards of the sessions that each answers.

Sessions come one by one, and the question is asked after each. So the intervals hold at all times at once: confidence
sequences for means of bounded values by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", 2024, arXiv 2010.09686, section 4). Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agl_core.config.deployment import CanarySection
from agl_core.deployment.standing import By, Decision, State

_POINTS = 200
"""The bounds are found on a grid of so many steps from 0 to 1, and rounded to the safe side."""
_BOLDEST = 0.75
"""The share of its capital that a bet may lose."""
_BOUNDS = 4
"""A rollback has four reasons: the reward, tool errors, empty answers, failed sessions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one session came to, in the order in which sessions ended."""

    version: int
    """The version that answered it."""
    name: str
    """What ties sessions of one name: `Rollout.group`."""
    reward: float | None
    """None: nobody gave any."""
    tool_errors: float = 0.0
    """The share of its tool calls that failed."""
    empty: float = 0.0
    """The share of its answers that are empty."""
    lost: bool = False
    """Whether calls of it failed or were not recorded."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the sessions say so far."""

    decision: Decision | None
    """None: go on."""
    figures: dict[str, float]


def judged(policy: str, canary: int, stable: int, outcomes: Iterable[Outcome], settings: CanarySection) -> Look:
    """What the sessions since the canary began say: promote it, roll it back, or go on.

    Only sessions that ran beside each other compare: `outcomes` are those that began after the canary did. Asked after
    every session, a canary whose mean reward is lower by `tolerance` or more is promoted with a probability of at most
    `error`, and one that is as good in every respect is rolled back with a probability of at most `error`, apart from
    those that `max_sessions` ends.
    """
    counted = list(_counted(outcomes, settings.per_name))
    of_canary = [each for each in counted if each.version == canary]
    of_stable = [each for each in counted if each.version == stable]
    ours, theirs = _rewards(of_canary, settings), _rewards(of_stable, settings)
    width = settings.reward[1] - settings.reward[0]
    figures = {**_figures("canary", of_canary, ours, settings), **_figures("stable", of_stable, theirs, settings)}

    def rolled_back(reason: str) -> Look:
        return Look(Decision(policy, canary, State.ROLLED_BACK, By.CANARY, reason, figures), figures)

    for name, what, limit, of in _LIMITS:
        here, there = (_array([of(each) for each in arm]) for arm in (of_canary, of_stable))
        figures |= {f"canary/{name}": _mean(here), f"stable/{name}": _mean(there)}
        if _surely_above(here, there, getattr(settings, limit), settings.error / _BOUNDS):
            return rolled_back(
                f"The share of {what} is {_mean(here):.3f} of {len(here)} sessions, and {_mean(there):.3f} of "
                f"{len(there)} with version {stable}."
            )
    means = f"{figures['canary/reward']:.3f} of {len(ours)} sessions, and {figures['stable/reward']:.3f} of " + (
        f"{len(theirs)} with version {stable}"
    )
    if _surely_above(theirs, ours, 0.0, settings.error / _BOUNDS):
        return rolled_back(f"The live reward is lower: {means}.")
    lower = width * (low(ours, settings.error / 2) - high(theirs, settings.error / 2))
    figures["difference/low"] = lower
    if lower > -settings.tolerance and min(len(ours), len(theirs)) >= settings.min_sessions:
        reason = f"The live reward is {means}; the difference is above {lower:+.3f}."
        return Look(Decision(policy, canary, State.STABLE, By.CANARY, reason, figures), figures)
    if len(ours) >= settings.max_sessions:
        return rolled_back(f"Nothing showed in time that it is as good: the live reward is {means}.")
    return Look(None, figures)


_LIMITS: Sequence[tuple[str, str, str, Callable[[Outcome], float]]] = (
    ("tool_errors", "tool calls that fail", "max_tool_errors", lambda each: each.tool_errors),
    ("empty", "empty answers", "max_empty", lambda each: each.empty),
    ("lost", "sessions that fail", "max_lost", lambda each: float(each.lost)),
)
"""Name, words, setting and value of each limit."""


def low(values: NDArray[np.float64], error: float) -> float:
    """A number that the mean of such values is above, at all times at once, but for a probability of `error`.

    The values are between 0 and 1, in their order. A bet on each against a mean of m wins or loses; its capital is a
    martingale if m is the mean, and passes 1/error with a probability of `error` at most (Ville's inequality).

    >>> low(np.ones(200), 0.05) > 0.95, low(np.zeros(200), 0.05)
    (True, 0.0)
    """
    count = len(values)
    if not values.any():
        return 0.0
    times = np.arange(1, count + 1)
    means = (0.5 + np.cumsum(values)) / (times + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (times + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2 * np.log(1 / error) / (before * times * np.log1p(times)))
    points = np.arange(1, _POINTS + 1) / _POINTS
    stakes = np.minimum(bets[:, None], _BOLDEST / points)
    capital = np.cumsum(np.log1p(stakes * (values[:, None] - points)), axis=0).max(axis=0)
    refuted = np.flatnonzero(capital < np.log(1 / error))
    return float((refuted[0] if len(refuted) else _POINTS) / _POINTS)


def high(values: NDArray[np.float64], error: float) -> float:
    """The same for a number that the mean is below."""
    return 1.0 - low(1.0 - values, error)


def _surely_above(some: NDArray[np.float64], others: NDArray[np.float64], by: float, error: float) -> bool:
    """Whether the mean of some is above that of others by more than `by`, but for a probability of `error`."""
    lowest = low(some, error / 2)
    return lowest > by and lowest - high(others, error / 2) > by


def _counted(outcomes: Iterable[Outcome], per_name: int) -> Iterator[Outcome]:
    """The first sessions of each name and version."""
    seen: Counter[tuple[str, int]] = Counter()
    for each in outcomes:
        seen[each.name, each.version] += 1
        if seen[each.name, each.version] <= per_name:
            yield each


def _rewards(outcomes: Sequence[Outcome], settings: CanarySection) -> NDArray[np.float64]:
    """The rewards, as shares of the way from the smallest to the largest."""
    smallest, largest = settings.reward
    given = _array([each.reward for each in outcomes if each.reward is not None])
    return np.clip((given - smallest) / (largest - smallest), 0.0, 1.0)


def _figures(
    arm: str, outcomes: Sequence[Outcome], rewards: NDArray[np.float64], settings: CanarySection
) -> dict[str, float]:
    smallest, largest = settings.reward
    return {
        f"{arm}/sessions": float(len(outcomes)),
        f"{arm}/rewarded": float(len(rewards)),
        f"{arm}/reward": smallest + (largest - smallest) * _mean(rewards),
    }


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
