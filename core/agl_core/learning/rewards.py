"""Reward rules over a recorded episode, with provenance."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agl_core.protocols import RewardRule, RewardValue
from agl_core.rules import reward_rule
from agl_core.types import DropReason, Ending, Episode, Json, Reward

AGENT_SOURCE = "agent"
"""The source of rewards that the agent itself reported."""

_LARGEST = float(np.finfo(np.float32).max)
"""What single precision holds, in which advantages are computed; a larger reward would be infinite there."""


@reward_rule
def reported(episode: Episode) -> float | None:
    """The sum of what the agent itself reported: `agl_core.reward(value)`, or a number that it returned.

    It is the reward of a run that names no rule.
    """
    values = [r.value for r in episode.rewards if r.source == AGENT_SOURCE]
    return math.fsum(values) if values else None


@dataclass(frozen=True, slots=True)
class ScoringRule:
    """A reward rule as the run's configuration has it."""

    name: str
    """The name of its table, and the provenance of its rewards."""
    rule: RewardRule
    weight: float = 1.0
    """Its share in the terminal reward."""


_TOGETHER = 64
"""Episodes judged at the same time; what a rule waits for (a model that judges) is waited for together."""


async def score_all(
    episodes: Sequence[Episode], rules: Sequence[ScoringRule], endings: Mapping[Ending, float | Json]
) -> list[tuple[Episode, list[Exception]]]:
    """`score` for each episode, in their order, many at the same time."""
    free = asyncio.Semaphore(_TOGETHER)

    async def judged(episode: Episode) -> tuple[Episode, list[Exception]]:
        async with free:
            return await score(episode, rules, endings)

    return list(await asyncio.gather(*map(judged, episodes)))


async def score(
    episode: Episode, rules: Sequence[ScoringRule], endings: Mapping[Ending, float | Json]
) -> tuple[Episode, list[Exception]]:
    """The episode with its rewards: the terminal one is Σ weight · value over the rules that had something to say.

    `endings` says by the rollout's ending whether the rules judge it ("score"), it has a fixed terminal reward (a
    number), or it is dropped ("drop"); one that was dropped for its ending already is returned as it is. A rule that
    raises, or rewards a call that the episode does not have, drops the episode; the exceptions are returned, with a
    note naming rule and rollout, so that the run can report them. A value that is not finite in single precision
    drops the episode too, which then has no terminal reward. A rule of weight 0, which is there to be looked at, drops
    nothing: where it fails, or its value is not finite, the exception is returned and it has said nothing.
    """
    if episode.dropped is DropReason.ENDING:
        return episode, []
    treatment = endings.get(episode.ending, "score")
    if treatment == "drop":
        return replace(episode, dropped=DropReason.ENDING), []
    if treatment != "score":
        fixed = _reward(episode, episode.ending.value, float(treatment), "endings")
        return replace(episode, rewards=(*episode.rewards, fixed), terminal=fixed.value), []
    terminal: list[Reward] = []
    intermediate: list[Reward] = []
    total = 0.0
    errors: list[Exception] = []
    failed = False
    for scoring in rules:
        try:
            found = scoring.rule(episode)
            value: RewardValue = await found if inspect.isawaitable(found) else found
            given = _as_rewards(episode, scoring.name, value)
            if scoring.weight == 0 and not _are_finite(each.value for each in given):
                raise ValueError("it gave what is not a finite number")
        except Exception as error:
            error.add_note(f"The reward rule '{scoring.name}' failed on rollout {episode.rollout}.")
            errors.append(error)
            failed = failed or scoring.weight != 0
            continue
        terminal += [reward for reward in given if reward.call is None]
        total += sum(scoring.weight * reward.value for reward in given if reward.call is None)
        intermediate += [replace(r, value=scoring.weight * r.value) for r in given if r.call is not None]
    if failed:
        return replace(episode, dropped=DropReason.REWARD_FAILED), errors
    finite = _are_finite([total, *(r.value for r in (*terminal, *intermediate))])
    by_call: dict[tuple[str, int], list[Reward]] = {}
    for reward in intermediate:
        by_call.setdefault((reward.call or "", reward.choice), []).append(reward)
    scored = replace(
        episode,
        rewards=(*episode.rewards, *terminal),
        terminal=total if finite else None,
        transitions=tuple(
            replace(t, rewards=(*t.rewards, *by_call.get((t.key.call, t.key.choice), ()))) for t in episode.transitions
        ),
        dropped=episode.dropped if finite else DropReason.NON_FINITE,
    )
    return scored, errors


def was_rewarded(episode: Episode) -> bool:
    """Whether a rule, or the table of endings, had anything to say of it."""
    judged = any(r.source != AGENT_SOURCE for r in episode.rewards)
    return judged or any(r.source != AGENT_SOURCE for t in episode.transitions for r in t.rewards)


def _are_finite(values: Iterable[float]) -> bool:
    """Whether all are, in single precision."""
    return all(abs(value) <= _LARGEST for value in values)


def _as_rewards(episode: Episode, name: str, value: RewardValue) -> list[Reward]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [_reward(episode, f"{name}.{part}", float(each), name) for part, each in value.items()]
    if isinstance(value, Sequence):
        return _added([_checked(episode, each, name) for each in value])
    return [_reward(episode, name, float(value), name)]


def _added(rewards: Sequence[Reward]) -> list[Reward]:
    """Rewards of one name for one choice add up, for the store keeps one of each."""
    totals: dict[tuple[str, str | None, int], Reward] = {}
    for reward in rewards:
        key = (reward.name, reward.call, reward.choice)
        totals[key] = replace(reward, value=totals[key].value + reward.value) if key in totals else reward
    return list(totals.values())


def _checked(episode: Episode, reward: Reward, source: str) -> Reward:
    """A reward that a rule made itself, under the episode's own keys. ValueError if there is no such call."""
    calls = {(t.key.call, t.key.choice) for t in episode.transitions}
    if reward.call is not None and (reward.call, reward.choice) not in calls:
        raise ValueError(
            f"it rewards choice {reward.choice} of call {reward.call!r}, which the episode does not have; take "
            f"`call` and `choice` from the `key` of one of `episode.transitions`"
        )
    return replace(reward, rollout=episode.rollout, attempt=episode.attempt, value=float(reward.value), source=source)


def _reward(episode: Episode, name: str, value: float, source: str) -> Reward:
    return Reward(rollout=episode.rollout, attempt=episode.attempt, name=name, value=value, source=source)
