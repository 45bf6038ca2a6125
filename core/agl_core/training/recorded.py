"""Recorded rollouts become episodes, scored and credited by a configuration: in training, and to try another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agl_core.config import ScoredConfig
from agl_core.errors import StoreRefusedError
from agl_core.learning import ScoringRule, build_episode
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.run_hooks import RunHooks
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Call, DropReason, Ending, Episode, Reward, Rollout, Run, ToolResult

Recorded = TypeVar("Recorded", Call, ToolResult, Reward)


@dataclass(frozen=True, slots=True)
class GroupCredit:
    """The credit that one step gave the transitions of a group, of one policy."""

    step: int
    policy: str
    by_rollout: Mapping[str, Sequence[float]]
    """The credit of the transitions that reached the algorithm, by rollout."""

    @property
    def mean(self) -> float:
        """The mean over rollouts, each of which counts once: 1/G · Σ_i 1/T_i · Σ_t v_it."""
        return math.fsum(math.fsum(values) / len(values) for values in self.by_rollout.values()) / len(self.by_rollout)

    @property
    def std(self) -> float:
        """The unbiased deviation over rollouts: √(1/(G−1) · Σ_i 1/T_i · Σ_t (v_it − mean)²); 0 for one rollout."""
        mean = self.mean
        squares = [math.fsum((v - mean) ** 2 for v in values) / len(values) for values in self.by_rollout.values()]
        return math.sqrt(math.fsum(squares) / max(len(squares) - 1, 1))


async def recorded_episodes(store: Store, rollouts: Sequence[Rollout], hook: RunHooks) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet scored.

    It has the recorded rewards that the agent reported; rules compute theirs again. A rollout without a counted attempt
    (it was cancelled, or its worker was lost) is an episode dropped for its ending. StoreRefusedError if calls of a
    rollout were pruned.
    """
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    recorded = await store.calls(keys)
    pruned = next((call.rollout for call in recorded if call.pruned), None)
    if pruned is not None:
        raise StoreRefusedError(
            f"The calls of rollout {pruned} were pruned (`agl runs prune`): their texts and tokens are gone, so "
            f"nothing is left to judge. Choose a later step."
        )
    calls = _by_rollout(recorded)
    tool_results = _by_rollout(await store.tool_results(keys))
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
            tool_results.get(rollout.id, ()),
            rewards.get(rollout.id, ()),
        )
        episodes.append(hook.episode_built(episode))
    return episodes


def scoring_rules(loaded: ScoredConfig) -> list[ScoringRule]:
    """The reward rules of a run; if there are none, the reward is what the agent itself reported."""
    rules = [
        ScoringRule(name, chosen.build(), loaded.config.rewards[name].weight) for name, chosen in loaded.rewards.items()
    ]
    return rules or [ScoringRule("reported", reported)]


def reward_weights(run: Run) -> dict[str, float]:
    """The weights of a run's reward rules in the terminal reward, by name."""
    return {name: float(section["weight"]) for name, section in run.config.get("rewards", {}).items()}


async def group_credit(store: Store, rollout: Rollout) -> list[GroupCredit]:
    """For each step that trained on the rollout's group: the credit of all its members' transitions."""
    members = [
        r
        for r in await store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
        if r.restart == rollout.restart
    ]
    keys = [AttemptKey(r.id, r.counted_attempt) for r in members if r.counted_attempt is not None]
    policies = {call.id: call.policy for call in await store.calls(keys)}
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for record in await store.training_records(keys):
        if record.credit is not None and record.advantage is not None:
            of_step = found.setdefault((record.step, policies.get(record.call, "")), {})
            of_step.setdefault(record.rollout, []).append(record.credit)
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
