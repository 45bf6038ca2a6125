"""Recorded rollouts as episodes, for training and for whatever reads a run later; the rules that score them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from agl_core.config import LoadedConfig
from agl_core.errors import StoreRefusedError
from agl_core.learning import ScoringRule, build_episode
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.run_hooks import RunHooks
from agl_core.store.interface import ErasableStore, Store
from agl_core.types import (
    Annotation,
    AttemptKey,
    Call,
    DropReason,
    Ending,
    Episode,
    Mode,
    Reward,
    Rollout,
    ToolResult,
    TrainingRecord,
)

Recorded = TypeVar("Recorded", Call, ToolResult, Reward, TrainingRecord, Annotation)


async def recorded_episodes(store: Store, rollouts: Sequence[Rollout], hook: RunHooks) -> list[Episode]:
    """The episode of each rollout's counted attempt, as the `episode_built` hooks leave it, not yet scored.

    It has the recorded rewards that the agent reported, and what others said; rules compute theirs again. A rollout
    without a counted attempt (it was cancelled, or its worker was lost) is an episode dropped for its ending.
    StoreRefusedError if calls of a rollout were pruned.
    """
    keys = counted_attempts(rollouts)
    recorded = await store.calls(keys)
    pruned = next((call.rollout for call in recorded if call.pruned), None)
    if pruned is not None:
        raise StoreRefusedError(
            f"The calls of rollout {pruned} were pruned (`agl runs prune`): their texts and tokens are gone, so "
            f"nothing is left to score. Choose a later step."
        )
    calls = by_rollout(recorded)
    tool_results = by_rollout(await store.tool_results(keys))
    rewards = by_rollout([r for r in await store.rewards(keys) if r.source == AGENT_SOURCE])
    annotations = by_rollout(await store.annotations(keys)) if isinstance(store, ErasableStore) else {}
    attempts = {attempt.key: attempt for attempt in await store.attempts(*(each.id for each in rollouts))}
    episodes = []
    for rollout in rollouts:
        attempt = attempts.get(AttemptKey(rollout.id, rollout.counted_attempt or 0))
        if attempt is None or rollout.counted_attempt is None:
            episodes.append(_lost(rollout))
            continue
        episode = build_episode(
            rollout,
            attempt,
            calls.get(rollout.id, ()),
            tool_results.get(rollout.id, ()),
            rewards.get(rollout.id, ()),
            annotations.get(rollout.id, ()),
        )
        episodes.append(hook.episode_built(episode))
    return episodes


def scoring_rules(loaded: LoadedConfig) -> list[ScoringRule]:
    """The reward rules of a run. Of tasks that no rule scores, the reward is what the agent itself reported."""
    rules = [
        ScoringRule(name, chosen.build(), section.weight, frozenset(section.modes), section.time_limit)
        for name, chosen in loaded.rewards.items()
        for section in [loaded.config.rewards[name]]
    ]
    tasks = frozenset(Mode) - {Mode.USE}
    is_scored = any(rule.modes & tasks for rule in rules)
    return rules if is_scored else [*rules, ScoringRule("reported", reported, modes=tasks)]


def counted_attempts(rollouts: Iterable[Rollout]) -> list[AttemptKey]:
    """The attempt of each rollout that counts; none of a rollout that has no such attempt."""
    return [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]


def by_rollout(records: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Records grouped by their rollout, in their order."""
    grouped: dict[str, list[Recorded]] = {}
    for record in records:
        grouped.setdefault(record.rollout, []).append(record)
    return grouped


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
