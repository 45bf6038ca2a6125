"""Reward rules over a recorded episode, with provenance."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agl_core.protocols import RewardRule, RewardValue
from agl_core.rules import reward_rule
from agl_core.types import DropReason, Ending, Episode, Json, Reward

AGENT_SOURCE = "agent"
"""The source of rewards that the agent itself reported."""


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


async def score(
    episode: Episode, rules: Sequence[ScoringRule], endings: Mapping[Ending, float | Json]
) -> tuple[Episode, list[Exception]]:
    """The episode with its rewards: the terminal one is Σ weight · value over the rules that had something to say.

    `endings` says by the rollout's ending whether the rules judge it ("score"), it has a fixed terminal reward (a
    number), or it is dropped ("drop"). A rule that raises drops the episode, as does a value that is not finite;
    the exceptions are returned so that the run can report them.
    """
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
    for scoring in rules:
        try:
            found = scoring.rule(episode)
            value: RewardValue = await found if inspect.isawaitable(found) else found
            for reward in _as_rewards(episode, scoring.name, value):
                if reward.call is None:
                    total += scoring.weight * reward.value
                    terminal.append(reward)
                else:
                    intermediate.append(replace(reward, value=scoring.weight * reward.value))
        except Exception as error:
            errors.append(error)
    if errors:
        return replace(episode, dropped=DropReason.REWARD_FAILED), errors
    finite = all(math.isfinite(r.value) for r in (*terminal, *intermediate)) and math.isfinite(total)
    by_call: dict[tuple[str, int], list[Reward]] = {}
    for reward in intermediate:
        by_call.setdefault((reward.call or "", reward.choice), []).append(reward)
    scored = replace(
        episode,
        rewards=(*episode.rewards, *terminal),
        terminal=total,
        transitions=tuple(
            replace(t, rewards=(*t.rewards, *by_call.get((t.key.call, t.key.choice), ()))) for t in episode.transitions
        ),
        dropped=episode.dropped if finite else DropReason.NON_FINITE,
    )
    return scored, []


def _as_rewards(episode: Episode, name: str, value: RewardValue) -> list[Reward]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [_reward(episode, f"{name}.{part}", float(each), name) for part, each in value.items()]
    if isinstance(value, Sequence):
        return [replace(each, source=name) for each in value]
    return [_reward(episode, name, float(value), name)]


def _reward(episode: Episode, name: str, value: float, source: str) -> Reward:
    return Reward(rollout=episode.rollout, attempt=episode.attempt, name=name, value=value, source=source)
