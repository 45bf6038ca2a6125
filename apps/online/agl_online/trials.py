"""Trials of a new version before it may answer sessions: the gate by held-out tasks, then a canary by some sessions.

The gate compares two evaluations task by task. A canary is judged after each session, so its bounds hold at all times
at once: confidence sequences for means of bounded values by betting (Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", 2024, arXiv 2010.09686, section 4). The values are differences between sessions of
both versions that ended beside each other, so that a change in users' wishes, which both see, says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agl_core.learning.batch import BatchPlan, make_batches
from agl_core.protocols import Engine
from agl_core.types import DropReason, Episode, Mode, RolloutState, episode_return
from agl_online.config import CanarySection, GateSection
from agl_online.experience import read_ended
from agl_online.versions import DecidedBy, Decision, State
from agl_server.health.rollouts import health_metrics, mean
from agl_server.training.evaluation import Evaluation, compare
from agl_server.training.rollouts import ScoredRollout
from agl_server.training.session import Session

_MIN_TASKS = 20
"""Tasks of a set that both versions need: the interval of the difference takes means for normal."""
_MAX_KL = 0.5
"""Nats per token from the served version, by its sampled replies."""
_MAX_LENGTH = 2.0
"""The new length of responses over the served version's."""
_MAX_RISES = {
    "tool_results/failed": (0.1, "tool calls that fail"),
    "answers/empty": (0.05, "empty answers"),
    "answers/refused": (0.05, "answers that refuse"),
    "answers/question": (0.2, "answers that end with a question"),
}
"""The largest rise at the gate of shares that a policy may learn to raise for its reward."""
_OF_SESSIONS = ("tool_results/failed", "answers/empty")
"""The shares that limit a canary's sessions too."""
_ERROR = 0.05
"""The probability of a false promotion, and that of a false rollback, at most."""
_POINTS = 400
"""Steps from 0 to 1 of the grid on which bounds are found; they are rounded to the safe side."""
_BOLDEST = 0.75
"""The share of its capital that a bet may lose."""
_MAX_SESSIONS = 2000
"""Rewarded sessions of a canary without a decision, after which it is rolled back."""
_REASONS = 1 + len(_OF_SESSIONS)
"""Possible reasons of a rollback: the reward, and each of these shares."""


def decide_at_gate(
    step: int, candidate: Evaluation, incumbent: Evaluation, settings: GateSection, *, divergence: Mapping[str, float]
) -> Decision:
    """The decision on a candidate, by evaluations of both versions on the same tasks and `measure_divergence`."""
    figures, reasons = {**divergence}, list[str]()
    comparisons = compare(candidate.scores, incumbent.scores, success=1.0)  # Which count as solved says nothing here.
    for comparison in comparisons:
        key, difference = f"{comparison.set}/{comparison.mode}", comparison.difference
        where = key.replace("/", ", ")
        figures |= {
            f"{key}/reward/difference": difference.value,
            f"{key}/reward/low": difference.low,
            f"{key}/reward/high": difference.high,
            f"{key}/tasks": float(comparison.tasks),
        }
        if comparison.tasks < _MIN_TASKS:
            few = f"{comparison.tasks} tasks are too few to compare rewards on {where}"
            reasons.append(f"{few} ({_MIN_TASKS} are enough)")
        elif not difference.low > -settings.tolerance:
            reasons.append(
                f"the reward on {where} may be lower by more than {settings.tolerance:g} ({difference.value:+.3f}, 95% "
                f"interval {difference.low:+.3f} to {difference.high:+.3f})"
            )

    def of_both(name: str) -> Iterator[tuple[str, float, float]]:
        """A metric in each set and mode: the set and mode, its value before and now."""
        for key, now in candidate.metrics.items():
            if key.endswith(f"/{name}"):
                before = incumbent.metrics.get(key, 0.0)
                figures.update({key: now, f"{key}/before": before})
                yield key.removesuffix(f"/{name}").replace("/", ", "), before, now

    gains = [f"reward {before:.3f} → {now:.3f} on {where}" for where, before, now in of_both("reward/mean")]
    if not comparisons:
        reasons.append("no task was evaluated with both versions")
    if not divergence:
        reasons.append("no sampled reply showed how far it is from the served version")
    for key, nats in divergence.items():
        if not nats <= _MAX_KL:
            where = key.removesuffix("/kl").replace("/", ", ")
            reasons.append(
                f"it is {nats:.3f} nats per token from the served version on {where} (more than {_MAX_KL:g})"
            )
    for name, (limit, what) in _MAX_RISES.items():
        for where, before, now in of_both(name):
            if now - before > limit:
                reasons.append(f"the share of {what} rose from {before:.3f} to {now:.3f} on {where}")
    for where, before, now in of_both("length/response"):
        if before and now > _MAX_LENGTH * max(before, 1.0):
            reasons.append(f"responses grew from {before:.0f} to {now:.0f} tokens on {where}")
    text = "; ".join(reasons or gains)
    state = State.REJECTED if reasons else State.PASSED
    return Decision(step, state, DecidedBy.GATE, f"{text[:1].upper()}{text[1:]}.", figures)


async def measure_divergence(
    engine: Engine, policy: str, episodes: Mapping[str, Sequence[Episode]], agents: Sequence[str]
) -> dict[str, float]:
    """KL(served ‖ new) in nats per token, by held-out set and mode: `eval/sampled/kl`.

    `episodes` are of the served version, by set and mode; the engine holds the new weights. It is the mean over
    recorded tokens of exp(d) − 1 − d with d = log π_new − log π_served (k3 of Schulman, "Approximating KL divergence",
    2020). Greedy replies and replies without exact log-probabilities do not count.
    """
    figures = {}
    for where, evaluated in episodes.items():
        groups = [[episode] for episode in evaluated]
        batch = make_batches(groups, BatchPlan({}, agents)).batches.get(policy)
        if batch is not None:
            served_R = batch.behaviour_logprobs_R[batch.mask_R].astype(np.float64)
            change_R = (await engine.logprobs(policy, batch)).logprobs_R[batch.mask_R] - served_R
            figures[f"{where}/kl"] = float(np.mean(np.expm1(change_R) - change_R))
    return figures


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one session."""

    version: int
    name: str
    """`Rollout.group`, which ties sessions of one name."""
    reward: float | None
    """None: no user gave any."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Failed tool calls and empty answers, by `_OF_SESSIONS`; 0 where there are none."""


def judge_canary(canary: int, stable: int, outcomes: Iterable[Outcome], settings: CanarySection) -> Decision | None:
    """The decision by the sessions since the canary began: promote it, roll it back, or (None) go on.

    `outcomes` are those of sessions that began after the canary did, in the order of their ends. Asked after every
    session, it promotes a canary whose mean reward is lower by `tolerance` or more with a probability of at most
    `_ERROR`, and rolls back one that is as good in every respect with at most `_ERROR`, but for `_MAX_SESSIONS`.
    """
    first: dict[tuple[str, int], Outcome] = {}
    for outcome in outcomes:
        first.setdefault((outcome.name, outcome.version), outcome)  # So no user outweighs others.
    counted = list(first.values())
    arms = {"canary": canary, "stable": stable}
    rewards, figures = dict[str, list[float]](), dict[str, float]()
    for arm, version in arms.items():
        own = [outcome for outcome in counted if outcome.version == version]
        rewards[arm] = [outcome.reward for outcome in own if outcome.reward is not None]
        figures |= {f"{arm}/sessions": float(len(own)), f"{arm}/rewarded": float(len(rewards[arm]))}
        figures |= {f"{arm}/reward": mean(rewards[arm])}
        figures |= {f"{arm}/{name}": mean(outcome.shares.get(name, 0.0) for outcome in own) for name in _OF_SESSIONS}

    def decision(state: State, reason: str) -> Decision:
        return Decision(canary, state, DecidedBy.CANARY, reason, figures)

    for name in _OF_SESSIONS:
        limit, what = _MAX_RISES[name]
        rises = differences(((outcome.version, outcome.shares.get(name, 0.0)) for outcome in counted), canary, stable)
        if lower_bound(rises, _ERROR / _REASONS, -1.0) > limit:
            here, there = (f"{figures[f'{arm}/{name}']:.3f} in {figures[f'{arm}/sessions']:.0f}" for arm in arms)
            return decision(
                State.ROLLED_BACK, f"The share of {what} is {here} sessions, and {there} with version {stable}."
            )
    smallest, largest = settings.reward
    width = largest - smallest
    changes = differences(
        (
            (outcome.version, min(max((outcome.reward - smallest) / width, 0.0), 1.0))
            for outcome in counted
            if outcome.reward is not None
        ),
        canary,
        stable,
    )
    here, there = (f"{figures[f'{arm}/reward']:.3f} in {len(rewards[arm])}" for arm in arms)
    means = f"{here} sessions, and {there} with version {stable}"
    low = figures["difference/low"] = width * lower_bound(changes, _ERROR, -1.0)
    high = figures["difference/high"] = -width * lower_bound(-changes, _ERROR / _REASONS, -1.0)
    if high < 0:
        return decision(State.ROLLED_BACK, f"The live reward is lower: {means}.")
    if low > -settings.tolerance:
        return decision(State.STABLE, f"The live reward is {means}; the difference is above {low:+.3f}.")
    if len(rewards["canary"]) >= _MAX_SESSIONS:
        return decision(State.ROLLED_BACK, f"Nothing showed in time that it is as good: the live reward is {means}.")
    return None


def differences(values: Iterable[tuple[int, float]], canary: int, stable: int) -> NDArray[np.float64]:
    """The canary's mean value minus the stable version's, in each block of sessions; values are between 0 and 1.

    A block ends as soon as it has both versions, so each difference has the expectation of the versions' difference.
    """
    changes = []
    block: dict[int, list[float]] = {canary: [], stable: []}
    for version, value in values:
        if version not in block:
            continue
        block[version].append(value)
        if all(block.values()):
            changes.append(mean(block[canary]) - mean(block[stable]))
            block = {canary: [], stable: []}
    return np.asarray(changes, dtype=np.float64)


def lower_bound(values: NDArray[np.float64], error: float, smallest: float = 0.0) -> float:
    """A number that the mean of values in `smallest` … 1 is above, at all times at once, but with probability `error`.

    The capital of bets on each value against a mean of m is a martingale if m is the mean, and then passes 1/error with
    a probability of `error` at most (Ville).

    >>> lower_bound(np.ones(200), 0.05) > 0.95, lower_bound(np.zeros(200), 0.05)
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


_UNSCORED = frozenset({DropReason.NO_REWARD, DropReason.PLUGIN, DropReason.REWARD_FAILED, DropReason.NON_FINITE})


class Outcomes:
    """Reads outcomes from the store; a session is scored again only after new feedback on it."""

    def __init__(self, session: Session) -> None:
        self._collector, self._run = session.collector, session.run
        self._scored: dict[tuple[str, int], Outcome | None] = {}
        """By session, and its number of annotations."""

    async def since(self, moment: float, versions: Collection[int]) -> list[Outcome]:
        """Ended sessions of these versions that began after this moment, in the order of their ends."""
        store = self._collector.store
        done = await store.rollouts(run=self._run, mode=Mode.USE, state=RolloutState.DONE)
        ended = await read_ended(store, done)
        keys = {(rollout.id, number): rollout for rollout, attempt, number in ended if attempt.started >= moment}
        changed = [rollout for key, rollout in keys.items() if key not in self._scored]
        scored = {result.rollout.id: outcome_of(result) for result in await self._collector.scored(changed)}
        self._scored = {key: self._scored[key] if key in self._scored else scored[key[0]] for key in keys}
        outcomes = self._scored.values()
        return [outcome for outcome in outcomes if outcome is not None and outcome.version in versions]


def outcome_of(scored: ScoredRollout) -> Outcome | None:
    """The outcome of one session; None if no version of the run answered it, or several did."""
    episode = scored.episode
    versions = {transition.version for transition in episode.transitions}
    version = versions.pop() if len(versions) == 1 else None
    if version is None:
        return None
    shares = health_metrics([episode])
    return Outcome(
        version=version,
        name=scored.rollout.group,
        reward=None if episode.dropped in _UNSCORED else episode_return(episode),
        shares={name: shares[name] for name in _OF_SESSIONS if math.isfinite(shares[name])},
    )
