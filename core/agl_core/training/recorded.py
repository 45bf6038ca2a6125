"""Recorded rollouts become episodes, judged and credited as a configuration says: in training, and to try another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from agl_core.config import LoadedConfig
from agl_core.learning import ScoringRule, build_episode
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Call, DropReason, Ending, Episode, Outcome, Reward, Rollout, Run

Recorded = TypeVar("Recorded", Call, Outcome, Reward)


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
