"""Another reward or credit configuration, tried on recorded rollouts: what training would have made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from agl_core.config.load import LoadedConfig
from agl_core.errors import ConfigError, nearest
from agl_core.learning import PolicyCredit, make_batches, score_all
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.store.interface import Store
from agl_core.training.recorded import recorded_episodes, reward_weights, scoring_rules
from agl_core.types import (
    AttemptKey,
    DropReason,
    Episode,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    TransitionKey,
    Use,
)

Value: TypeAlias = float | str | None
"""A reward or credited value; the reason where it was dropped instead; None where there is none."""

_JUDGED = frozenset({DropReason.GROUP_TOO_SMALL, DropReason.NO_TRANSITION, DropReason.STALE})
"""Reasons for which an episode is left out although rules judged it."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was recorded, and what the tried configuration makes of it."""

    before: Value
    after: Value

    @property
    def changed(self) -> bool:
        """Whether they differ by more than rounding."""
        before, after = self.before, self.after
        if isinstance(before, int | float) and isinstance(after, int | float):
            both_nan = math.isnan(before) and math.isnan(after)
            return not both_nan and not math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12)
        return before != after


@dataclass(frozen=True, slots=True)
class RewardChange:
    """One named reward, by its provenance."""

    name: str
    source: str
    value: Change


@dataclass(frozen=True, slots=True)
class TransitionChange:
    """One transition's intermediate reward and credit."""

    transition: Transition
    rewards: tuple[RewardChange, ...]
    reward: Change
    """The sum of its intermediate rewards."""
    credit: Change

    @property
    def changed(self) -> bool:
        return self.reward.changed or self.credit.changed or any(each.value.changed for each in self.rewards)


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """One rollout; without a use on record (its step ended before the update) its recorded credit is None."""

    rollout: Rollout
    transitions: tuple[TransitionChange, ...]
    components: tuple[RewardChange, ...]
    """Of the terminal reward, each before its weight; also what the agent reported, which stays as recorded."""
    terminal: Change
    """R, or the reason why the episode is dropped."""
    left_out: int
    """Transitions that were used in training and that the episode no longer has (an `episode_built` hook)."""

    @property
    def changed(self) -> bool:
        values = (*(each.value for each in self.components), self.terminal)
        return self.left_out > 0 or any(t.changed for t in self.transitions) or any(v.changed for v in values)


@dataclass(frozen=True, slots=True)
class Trial:
    """What would change."""

    rollouts: tuple[RolloutChange, ...]
    failures: tuple[str, ...]
    """What reward rules raised, by rule and rollout; those rollouts would be dropped."""
    incomplete: Mapping[str, int]
    """Groups with members that are not done, which credit does without: how many."""

    def mean_reward(self) -> Change:
        """Over all tried rollouts; one that is dropped counts as 0, as in `reward/mean`."""
        changes = [each.terminal for each in self.rollouts]
        return Change(_mean([c.before for c in changes]), _mean([c.after for c in changes]))


async def try_rewards(store: Store, loaded: LoadedConfig, rollouts: Sequence[Rollout]) -> Trial:
    """Judge and credit recorded training rollouts as `loaded` says, each with the members of its group.

    Nothing is written. PluginError if a credit rule fails; ConfigError if the configuration lacks a policy that the
    rollouts were sampled from.
    """
    groups: list[list[Rollout]] = []
    incomplete = {}
    for name, run in sorted({(r.group, r.run) for r in rollouts}):
        members = await store.rollouts(run=run, group=name)
        done = sorted((m for m in members if m.state is RolloutState.DONE), key=lambda m: m.member)
        groups.append(done)
        if len(done) < len(members):
            incomplete[name] = len(members) - len(done)
    everyone = [r for group in groups for r in group]
    episodes, failures = await _judged(store, loaded, everyone)
    in_training = episodes | {
        id: replace(episodes[id], dropped=DropReason.STALE)
        for id in await _stale(store, everyone)
        if episodes[id].dropped is None
    }
    credits = credited(loaded, [[in_training[member.id] for member in group] for group in groups])
    recorded = await _recorded(store, rollouts)
    changes = tuple(_compared(r, episodes[r.id], credits, *recorded[r.id]) for r in rollouts)
    return Trial(changes, failures, incomplete)


def credited(loaded: LoadedConfig, groups: Sequence[Sequence[Episode]]) -> dict[TransitionKey, Value]:
    """What each transition is credited with by the configured rules, as training records it; else why not."""
    train = loaded.config.train
    unknown = {t.policy for group in groups for e in group for t in e.transitions} - loaded.policies.keys()
    if unknown:
        raise ConfigError(
            f"The recorded calls were answered by policy '{min(unknown)}', which the configuration does not have. "
            f"{nearest(min(unknown), loaded.policies)}"
        )
    prepared = make_batches(
        groups,
        {name: PolicyCredit.planned(plan) for name, plan in loaded.policies.items()},
        agents=train.agents,
        min_group_size=min(train.min_group_size, train.group_size),
    )
    found: dict[TransitionKey, Value] = {use.key: _credit(use) for use in prepared.dropped}
    for batch in prepared.batches.values():
        found |= dict(zip(batch.keys, batch.values_N.tolist(), strict=True))
    return found


async def _judged(
    store: Store, loaded: LoadedConfig, rollouts: Sequence[Rollout]
) -> tuple[dict[str, Episode], tuple[str, ...]]:
    rules = scoring_rules(loaded)
    episodes = await recorded_episodes(store, rollouts, loaded.plugins.hook)
    scored = await score_all(episodes, rules, loaded.config.train.endings)
    alike: dict[str, list[Exception]] = {}
    for error in (error for _, errors in scored for error in errors):
        alike.setdefault(f"{type(error).__name__}: {error}", []).append(error)
    failures = (
        f"{errors[0].__notes__[-1]} {said}" + (f" ({len(errors)} times in all)" if len(errors) > 1 else "")
        for said, errors in alike.items()
    )
    return {episode.rollout: episode for episode, _ in scored}, tuple(failures)


async def _stale(store: Store, rollouts: Sequence[Rollout]) -> set[str]:
    """Those that training left out for their age, which no other reward would change."""
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    return {use.rollout for use in await store.uses(keys) if use.dropped == DropReason.STALE}


async def _recorded(
    store: Store, rollouts: Sequence[Rollout]
) -> dict[str, tuple[list[Reward], list[Use], Mapping[str, float]]]:
    """By rollout: all its rewards, its uses, and the weights that its run had, by source."""
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    rewards, uses = await store.rewards(keys), await store.uses(keys)
    weights = {(run.id, run.incarnation): reward_weights(run) for run in await store.runs()}
    return {
        r.id: (
            [each for each in rewards if each.rollout == r.id],
            [each for each in uses if each.rollout == r.id],
            weights.get((r.run, r.incarnation), {}),
        )
        for r in rollouts
    }


def _compared(
    rollout: Rollout,
    episode: Episode,
    credits: Mapping[TransitionKey, Value],
    rewards: Sequence[Reward],
    uses: Sequence[Use],
    weights: Mapping[str, float],
) -> RolloutChange:
    used = {use.key: _credit(use) for use in uses}
    transitions = tuple(_compared_transition(t, credits, rewards, used) for t in episode.transitions)
    terminal = [r for r in rewards if r.call is None]
    given = [r for r in terminal if r.source != AGENT_SOURCE]
    reasons = {use.dropped for use in uses if use.credit is None} - _JUDGED
    before: Value = None
    if reasons:
        before = f"dropped: {min(str(reason) for reason in reasons)}"
    elif given or uses:
        before = math.fsum(weights.get(r.source, 1.0) * r.value for r in given)
    after: Value = episode.terminal if episode.dropped is None else f"dropped: {episode.dropped.value}"
    return RolloutChange(
        rollout=rollout,
        transitions=transitions,
        components=_by_provenance(terminal, [r for r in episode.rewards if r.call is None]),
        terminal=Change(after if before is None and isinstance(after, str) else before, after),
        left_out=len(used.keys() - {t.key for t in episode.transitions}),
    )


def _compared_transition(
    transition: Transition,
    credits: Mapping[TransitionKey, Value],
    rewards: Sequence[Reward],
    used: Mapping[TransitionKey, Value],
) -> TransitionChange:
    key = transition.key
    mine = [r for r in rewards if (r.call, r.choice) == (key.call, key.choice) and r.source != AGENT_SOURCE]
    return TransitionChange(
        transition=transition,
        rewards=_by_provenance(mine, transition.rewards),
        reward=Change(sum(r.value for r in mine), transition.reward),
        credit=Change(used.get(key), credits.get(key)),
    )


def _by_provenance(before: Sequence[Reward], after: Sequence[Reward]) -> tuple[RewardChange, ...]:
    """Each name and source once, in their order."""
    was = {(r.name, r.source): r.value for r in before}
    would_be = {(r.name, r.source): r.value for r in after}
    return tuple(RewardChange(*each, Change(was.get(each), would_be.get(each))) for each in {**was, **would_be})


def _credit(use: Use) -> Value:
    return use.credit if use.credit is not None else f"dropped: {use.dropped}"


def _mean(values: Sequence[Value]) -> float:
    numbers = [value if isinstance(value, int | float) else 0.0 for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0
