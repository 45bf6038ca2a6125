"""Recorded rollouts become episodes, judged and credited as a configuration says: in training, and to try another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agl_core.config import LoadedConfig
from agl_core.learning import ScoringRule, build_episode
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Call, DropReason, Ending, Episode, Outcome, Reward, Rollout, Run

Recorded = TypeVar("Recorded", Call, Outcome, Reward)


@dataclass(frozen=True, slots=True)
class GroupCredit:
    """What one step credited the transitions of a group with, of one policy."""

    step: int
    policy: str
    by_rollout: Mapping[str, Sequence[float]]
    """Of the transitions that reached the algorithm, by rollout."""

    @property
    def mean(self) -> float:
        """Over rollouts, each of which counts once: 1/G · Σ_i 1/T_i · Σ_t v_it."""
        return math.fsum(math.fsum(values) / len(values) for values in self.by_rollout.values()) / len(self.by_rollout)

    @property
    def std(self) -> float:
        """Likewise, and unbiased: √(1/(G−1) · Σ_i 1/T_i · Σ_t (v_it − mean)²); 0 for one rollout."""
        mean = self.mean
        squares = [math.fsum((v - mean) ** 2 for v in values) / len(values) for values in self.by_rollout.values()]
        return math.sqrt(math.fsum(squares) / max(len(squares) - 1, 1))


async def recorded_episodes(store: Store, rollouts: Sequence[Rollout], hook: Any) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet judged.

    Of the recorded rewards it has those that the agent reported; what rules gave is theirs to give again. A rollout
    without a counted attempt (it was cancelled, or its worker was lost) is an episode dropped for its ending.
    """
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    calls = _by_rollout(await store.calls(keys))
    outcomes = _by_rollout(await store.outcomes(keys))
    rewards = _by_rollout([r for r in await store.rewards(keys) if r.source == AGENT_SOURCE])
    episodes = []
    for rollout in rollouts:
        attempts = [a for a in await store.attempts(rollout.id) if a.attempt == rollout.counted_attempt]
        if not attempts:
            episodes.append(_lost(rollout))
            continue
        episode = build_episode(
            rollout,
            attempts[0],
            calls.get(rollout.id, ()),
            outcomes.get(rollout.id, ()),
            rewards.get(rollout.id, ()),
        )
        for changed in hook.episode_built(episode=episode):
            episode = changed if changed is not None else episode
        episodes.append(episode)
    return episodes


def scoring_rules(loaded: LoadedConfig) -> list[ScoringRule]:
    """The reward rules of a run; without any, what the agent itself reported is the reward."""
    rules = [
        ScoringRule(name, chosen.build(), loaded.config.rewards[name].weight) for name, chosen in loaded.rewards.items()
    ]
    return rules or [ScoringRule("reported", reported)]


def reward_weights(run: Run) -> dict[str, float]:
    """What the reward rules of a run weigh in the terminal reward, by name."""
    return {name: float(section["weight"]) for name, section in run.config.get("rewards", {}).items()}


async def group_credit(store: Store, rollout: Rollout) -> list[GroupCredit]:
    """Of each step that trained on the rollout's group: what all its members' transitions were credited with."""
    members = [
        r
        for r in await store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
        if r.incarnation == rollout.incarnation
    ]
    keys = [AttemptKey(r.id, r.counted_attempt) for r in members if r.counted_attempt is not None]
    policies = {call.id: call.policy for call in await store.calls(keys)}
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for use in await store.uses(keys):
        if use.credit is not None and use.advantage is not None:
            of_step = found.setdefault((use.step, policies.get(use.call, "")), {})
            of_step.setdefault(use.rollout, []).append(use.credit)
    order = {r.id: r.member for r in members}
    return [
        GroupCredit(step, policy, dict(sorted(values.items(), key=lambda item: order[item[0]])))
        for (step, policy), values in sorted(found.items())
    ]


def _lost(rollout: Rollout) -> Episode:
    return Episode(
        rollout=rollout.id,
        attempt=0,
        group=rollout.group,
        member=rollout.member,
        task=rollout.task,
        mode=rollout.mode,
        ending=rollout.ending or Ending.CANCELLED,
        transitions=(),
        dropped=DropReason.ENDING,
        step=rollout.step,
    )


def _by_rollout(records: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    grouped: dict[str, list[Recorded]] = {}
    for record in records:
        grouped.setdefault(record.rollout, []).append(record)
    return grouped
