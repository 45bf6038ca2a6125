"""Whether a canary is as good as the stable version, by the rewards of the sessions that each answers.

Sessions come one by one, and the question is asked after each. So the bounds hold at all times at once: confidence
sequences for means of bounded values by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", 2024, arXiv 2010.09686, section 4). The values are differences between sessions of both versions
that ended beside each other, so that a change of what users want, which both see, says nothing. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agl_core.learning.health import answer, has_failed
from agl_core.returns import episode_return
from agl_core.store.interface import ErasableStore
from agl_core.training.metrics import mean
from agl_core.training.rollouts import Collector, Scored
from agl_core.types import AttemptKey, DropReason, Ending, Mode, Rollout, RolloutState
from agl_online.config import CanarySection
from agl_online.ledger import By, Decision, State

_POINTS = 400
"""The bounds are found on a grid of so many steps from 0 to 1, and rounded to the safe side."""
_BOLDEST = 0.75
"""The share of its capital that a bet may lose."""
_MAX_SESSIONS = 2000
"""Rewarded sessions of a canary without a decision, after which it is rolled back."""
_REASONS = 4
"""A rollback has four reasons: the reward, tool errors, empty answers, failed sessions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one session came to."""

    version: int
    """The version that answered it."""
    name: str
    """What ties sessions of one name: `Rollout.group`."""
    reward: float | None
    """None: no user gave any."""
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


def look(policy: str, canary: int, stable: int, outcomes: Iterable[Outcome], settings: CanarySection) -> Look:
    """What the sessions since the canary began say: promote it, roll it back, or go on.

    `outcomes` are those of sessions that began after the canary did, in the order of their ends; where those without a
    reward stand among them does not matter. Asked after every session, a canary whose mean reward is lower by
    `tolerance` or more is promoted with a probability of at most `error`. One that is as good in every respect is
    rolled back with a probability of at most `error`, apart from those that end undecided.
    """
    counted = list(_counted(outcomes))
    arms = [[each for each in counted if each.version == version] for version in (canary, stable)]
    rewards = [[each.reward for each in arm if each.reward is not None] for arm in arms]
    figures = {**_figures("canary", arms[0], rewards[0]), **_figures("stable", arms[1], rewards[1])}

    def rolled_back(reason: str) -> Look:
        return Look(Decision(policy, canary, State.ROLLED_BACK, By.CANARY, reason, figures), figures)

    for name, what, limit, value in _LIMITS:
        values = [[value(each) for each in arm] for arm in arms]
        excess = _excess(values[0], values[1], settings.share)
        if low(excess, settings.error / _REASONS, -1.0) > limit:
            here, there = figures[f"canary/{name}"], figures[f"stable/{name}"]
            return rolled_back(
                f"The share of {what} is {here:.3f} in {len(arms[0])} sessions, and {there:.3f} in {len(arms[1])} with "
                f"version {stable}."
            )
    smallest, largest = settings.reward
    width = largest - smallest

    def reward(outcome: Outcome) -> float | None:
        given = outcome.reward
        return None if given is None else min(max((given - smallest) / width, 0.0), 1.0)

    found = differences(counted, canary, stable, reward)
    means = (
        f"{figures['canary/reward']:.3f} in {len(rewards[0])} sessions, and {figures['stable/reward']:.3f} in "
        f"{len(rewards[1])} with version {stable}"
    )
    figures["difference/low"] = width * low(found, settings.error, -1.0)
    figures["difference/high"] = -width * low(-found, settings.error / _REASONS, -1.0)
    if figures["difference/high"] < 0:
        return rolled_back(f"The live reward is lower: {means}.")
    if figures["difference/low"] > -settings.tolerance and min(map(len, rewards)) >= settings.min_sessions:
        reason = f"The live reward is {means}; the difference is above {figures['difference/low']:+.3f}."
        return Look(Decision(policy, canary, State.STABLE, By.CANARY, reason, figures), figures)
    if len(rewards[0]) >= _MAX_SESSIONS:
        return rolled_back(f"Nothing showed in time that it is as good: the live reward is {means}.")
    return Look(None, figures)


_LIMITS: Sequence[tuple[str, str, float, Callable[[Outcome], float]]] = (
    ("tool_errors", "tool calls that fail", 0.1, lambda each: each.tool_errors),
    ("empty", "empty answers", 0.05, lambda each: each.empty),
    ("lost", "sessions that fail", 0.05, lambda each: float(each.lost)),
)
"""Name and words of each share, by how much it may rise, and what a session adds to it."""


def differences(
    outcomes: Iterable[Outcome], canary: int, stable: int, value: Callable[[Outcome], float | None]
) -> NDArray[np.float64]:
    """Of one block of sessions after another, by how much the canary's mean value is above the stable version's.

    A block ends as soon as it has sessions of both, whatever their values are; so the expectation of each difference
    is that of the versions. Values are between 0 and 1; None: the session has none.
    """
    found = []
    block: dict[int, list[float]] = {canary: [], stable: []}
    for each in outcomes:
        measured = value(each)
        if measured is None or each.version not in block:
            continue
        block[each.version].append(measured)
        if all(block.values()):
            found.append(mean(block[canary]) - mean(block[stable]))
            block = {canary: [], stable: []}
    return np.asarray(found, dtype=np.float64)


def _excess(canary: Sequence[float], stable: Sequence[float], share: float) -> NDArray[np.float64]:
    """By how much each session of the canary is above as many of the stable version as come on one of the canary.

    It does not ask which came first: nothing says when a session that failed and was not recorded ended.
    """
    many = max(1, round((1 - share) / share)) if share else 1
    pairs = ((one, stable[many * place : many * (place + 1)]) for place, one in enumerate(canary))
    return np.asarray([one - mean(others) for one, others in pairs if len(others) == many], dtype=np.float64)


def low(values: NDArray[np.float64], error: float, smallest: float = 0.0) -> float:
    """A number that the mean of such values is above, at all times at once, but for a probability of `error`.

    The values are between `smallest` and 1, in their order. A bet on each against a mean of m wins or loses; its
    capital is a martingale if m is the mean, and passes 1/error with a probability of `error` at most (Ville).

    >>> low(np.ones(200), 0.05) > 0.95, low(np.zeros(200), 0.05)
    (True, 0.0)
    """
    shares = (values - smallest) / (1 - smallest)
    if not shares.any():
        return smallest
    times = np.arange(1, len(shares) + 1)
    means = (0.5 + np.cumsum(shares)) / (times + 1)
    variances = (0.25 + np.cumsum((shares - means) ** 2)) / (times + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2 * np.log(1 / error) / (before * times * np.log1p(times)))
    points = np.arange(1, _POINTS + 1) / _POINTS
    stakes = np.minimum(bets[:, None], _BOLDEST / points)
    capital = np.cumsum(np.log1p(stakes * (shares[:, None] - points)), axis=0).max(axis=0)
    possible = np.flatnonzero(capital < np.log(1 / error))
    share = float((possible[0] if len(possible) else _POINTS) / _POINTS)
    return smallest + (1 - smallest) * share


def _counted(outcomes: Iterable[Outcome]) -> Iterable[Outcome]:
    """The first session of each name and version, so that no user outweighs others."""
    first: dict[tuple[str, int], Outcome] = {}
    for outcome in outcomes:
        first.setdefault((outcome.name, outcome.version), outcome)
    return first.values()


def _figures(arm: str, outcomes: Sequence[Outcome], rewards: Sequence[float]) -> dict[str, float]:
    return {
        f"{arm}/sessions": float(len(outcomes)),
        f"{arm}/rewarded": float(len(rewards)),
        f"{arm}/reward": mean(rewards),
        **{f"{arm}/{name}": mean(map(value, outcomes)) for name, _, _, value in _LIMITS},
    }


_UNSCORED = frozenset({DropReason.NO_REWARD, DropReason.PLUGIN, DropReason.REWARD_FAILED, DropReason.NON_FINITE})


class Outcomes:
    """Reads them from the store; what was read before is read again only when something new was said of it."""

    def __init__(self, store: ErasableStore, collector: Collector, run: str) -> None:
        self._store, self._collector, self._run = store, collector, run
        self._known: dict[str, tuple[int, float, Outcome | None]] = {}
        """By session: the feedback that was counted, when it ended, and what it came to."""
        self._before: set[str] = set()
        """Sessions that ran earlier."""

    def forget(self) -> None:
        """Another canary begins."""
        self._known.clear()
        self._before.clear()

    async def since(self, moment: float, versions: Collection[int]) -> list[Outcome]:
        """The sessions of these versions that began after this moment and have ended, in the order of their ends."""
        ended = await self._store.rollouts(run=self._run, mode=Mode.USE, state=RolloutState.DONE)
        listed = [each for each in ended if each.id not in self._before]
        said = Counter(e.rollout for e in await self._store.annotations([AttemptKey(each.id, 0) for each in listed]))
        changed: list[Rollout] = []
        ends: dict[str, float] = {}
        for each in listed:
            known = self._known.get(each.id)
            if known is not None and known[0] == said[each.id]:
                continue
            attempts = await self._store.attempts(each.id)
            if not attempts or attempts[-1].started < moment:
                self._before.add(each.id)
                continue
            ends[each.id] = attempts[-1].ended or attempts[-1].started
            changed.append(each)
        for rollout, scored in zip(changed, await self._collector.scored(changed), strict=True):
            self._known[rollout.id] = (said[rollout.id], ends[rollout.id], outcome_of(scored))
        there = {each.id for each in listed}
        found = sorted((end, id) for id, (_, end, _) in self._known.items() if id in there)
        outcomes = (self._known[id][2] for _, id in found)
        return [each for each in outcomes if each is not None and each.version in versions]


def outcome_of(scored: Scored) -> Outcome | None:
    """What one session came to; None if no version of the run answered it, or several did."""
    rollout, episode = scored.rollout, scored.episode
    versions = {t.version for t in episode.transitions}
    version = versions.pop() if len(versions) == 1 else None
    if version is None:
        return None
    results = [each for t in episode.transitions for each in t.tool_results]
    said = answer(episode)
    return Outcome(
        version=version,
        name=rollout.group,
        reward=None if episode.dropped in _UNSCORED else episode_return(episode),
        tool_errors=sum(map(has_failed, results)) / len(results) if results else 0.0,
        empty=float(said is not None and not said.strip()),
        lost=rollout.ending is Ending.LOST,
    )
