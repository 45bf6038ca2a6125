"""Another reward or credit configuration, tried on recorded rollouts: what training would have made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agl_core.config.load import ScoredConfig
from agl_core.errors import ConfigError, nearest
from agl_core.learning import PolicyCredit, make_batches, score_all, score_groups
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
    TrainingRecord,
    Transition,
    TransitionKey,
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
    """One rollout; without a use on record (its step ended before the update) its recorded credit is None.

    Credit is given to training rollouts alone: that of a capture or of an evaluation is None.
    """

    episode: Episode
    """As the tried configuration judges it."""
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


async def try_rewards(store: Store, loaded: ScoredConfig, rollouts: Sequence[Rollout]) -> Trial:
    """Judge recorded rollouts as `loaded` says, and credit those of training, each with the members of its group.

    Nothing is written. PluginError if a credit rule fails; ConfigError if the configuration lacks a policy that
    training rollouts were sampled from.
    """
    groups: list[list[Rollout]] = []
    incomplete = {}
    for name, run in sorted({(r.group, r.run) for r in rollouts if r.mode.trains}):
        members = await store.rollouts(run=run, group=name)
        done = sorted((m for m in members if m.state is RolloutState.DONE), key=lambda m: m.member)
        groups.append(done)
        if len(done) < len(members):
            incomplete[name] = len(members) - len(done)
    members_of_groups = [r for group in groups for r in group]
    everyone = [*members_of_groups, *(r for r in rollouts if not r.mode.trains)]
    judged, failures = await _judged(loaded, await recorded_episodes(store, everyone, loaded.plugins.hook))
    episodes = {episode.rollout: episode for episode in judged}
    in_training = episodes | {
        id: replace(episodes[id], dropped=DropReason.STALE)
        for id in await _stale(store, everyone)
        if episodes[id].dropped is None
    }
    credits = credited(loaded, [[in_training[member.id] for member in group] for group in groups])
    recorded = await _recorded(store, rollouts)
    return Trial(tuple(_compared(episodes[r.id], credits, recorded[r.id]) for r in rollouts), failures, incomplete)


async def try_on_episodes(loaded: ScoredConfig, episodes: Sequence[Episode]) -> Trial:
    """The same for episodes that no store has (`agl_core.load_episodes`); those of one group are credited together."""
    unjudged = [loaded.plugins.hook.episode_built(_without_rules(episode)) for episode in episodes]
    judged, failures = await _judged(loaded, unjudged)
    groups: dict[str, list[Episode]] = {}
    for episode in judged:
        if episode.mode.trains:
            groups.setdefault(episode.group, []).append(episode)
    credits = credited(loaded, list(groups.values()))
    changes = tuple(
        _compared(after, credits, _Recorded([*before.rewards, *_of_calls(before)], _terminal(before)))
        for before, after in zip(episodes, judged, strict=True)
    )
    return Trial(changes, failures, {})


def credited(loaded: ScoredConfig, groups: Sequence[Sequence[Episode]]) -> dict[TransitionKey, Value]:
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
    found: dict[TransitionKey, Value] = {record.key: _credit(record) for record in prepared.dropped}
    for batch in prepared.batches.values():
        found |= dict(zip(batch.keys, batch.values_N.tolist(), strict=True))
    return found


async def _judged(loaded: ScoredConfig, episodes: Sequence[Episode]) -> tuple[list[Episode], tuple[str, ...]]:
    """The episodes with their rewards, and what rules raised."""
    rules, endings = scoring_rules(loaded), loaded.config.train.endings
    scored = await score_groups(await score_all(episodes, rules, endings), rules, endings)
    alike: dict[str, list[Exception]] = {}
    for error in (error for _, errors in scored for error in errors):
        alike.setdefault(f"{type(error).__name__}: {error}", []).append(error)
    failures = (
        f"{errors[0].__notes__[-1]} {said}" + (f" ({len(errors)} times in all)" if len(errors) > 1 else "")
        for said, errors in alike.items()
    )
    return [episode for episode, _ in scored], tuple(failures)


async def _stale(store: Store, rollouts: Sequence[Rollout]) -> set[str]:
    """Those that training left out for their age, which no other reward would change."""
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    return {record.rollout for record in await store.training_records(keys) if record.dropped == DropReason.STALE}


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What is on record of one rollout."""

    rewards: Sequence[Reward]
    terminal: Value
    credit: Mapping[TransitionKey, Value] = field(default_factory=dict)
    """Of the transitions that a step used."""


async def _recorded(store: Store, rollouts: Sequence[Rollout]) -> dict[str, _Recorded]:
    keys = [AttemptKey(r.id, r.counted_attempt) for r in rollouts if r.counted_attempt is not None]
    rewards, training_records = await store.rewards(keys), await store.training_records(keys)
    weights = {(run.id, run.restart): reward_weights(run) for run in await store.runs()}
    found = {}
    for rollout in rollouts:
        mine = [each for each in training_records if each.rollout == rollout.id]
        its_rewards = [each for each in rewards if each.rollout == rollout.id]
        weight = weights.get((rollout.run, rollout.restart), {})
        used = {record.key: _credit(record) for record in mine}
        found[rollout.id] = _Recorded(its_rewards, _recorded_terminal(its_rewards, mine, weight), used)
    return found


def _recorded_terminal(
    rewards: Sequence[Reward], training_records: Sequence[TrainingRecord], weights: Mapping[str, float]
) -> Value:
    """By the weights that the run had, by source."""
    reasons = {record.dropped for record in training_records if record.credit is None} - _JUDGED
    if reasons:
        return f"dropped: {min(str(reason) for reason in reasons)}"
    given = [r for r in rewards if r.call is None and r.source != AGENT_SOURCE]
    return math.fsum(weights.get(r.source, 1.0) * r.value for r in given) if given or training_records else None


def _terminal(episode: Episode) -> Value:
    return episode.terminal if episode.dropped is None else f"dropped: {episode.dropped.value}"


def _of_calls(episode: Episode) -> list[Reward]:
    return [reward for transition in episode.transitions for reward in transition.rewards]


def _without_rules(episode: Episode) -> Episode:
    """With what the agent reported, and without what rules gave, which is theirs to give again."""

    def reported(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
        return tuple(reward for reward in rewards if reward.source == AGENT_SOURCE)

    transitions = tuple(replace(each, rewards=reported(each.rewards)) for each in episode.transitions)
    return replace(episode, rewards=reported(episode.rewards), transitions=transitions, terminal=None, dropped=None)


def _compared(episode: Episode, credits: Mapping[TransitionKey, Value], recorded: _Recorded) -> RolloutChange:
    transitions = tuple(_compared_transition(t, credits, recorded) for t in episode.transitions)
    before, after = recorded.terminal, _terminal(episode)
    return RolloutChange(
        episode=episode,
        transitions=transitions,
        components=_by_provenance(
            [r for r in recorded.rewards if r.call is None], [r for r in episode.rewards if r.call is None]
        ),
        terminal=Change(after if before is None and isinstance(after, str) else before, after),
        left_out=len(recorded.credit.keys() - {t.key for t in episode.transitions}),
    )


def _compared_transition(
    transition: Transition, credits: Mapping[TransitionKey, Value], recorded: _Recorded
) -> TransitionChange:
    key = transition.key
    mine = [r for r in recorded.rewards if (r.call, r.choice) == (key.call, key.choice) and r.source != AGENT_SOURCE]
    return TransitionChange(
        transition=transition,
        rewards=_by_provenance(mine, transition.rewards),
        reward=Change(sum(r.value for r in mine), transition.reward),
        credit=Change(recorded.credit.get(key), credits.get(key)),
    )


def _by_provenance(before: Sequence[Reward], after: Sequence[Reward]) -> tuple[RewardChange, ...]:
    """Each name and source once, in their order."""
    was = {(r.name, r.source): r.value for r in before}
    would_be = {(r.name, r.source): r.value for r in after}
    return tuple(RewardChange(*each, Change(was.get(each), would_be.get(each))) for each in {**was, **would_be})


def _credit(record: TrainingRecord) -> Value:
    return record.credit if record.credit is not None else f"dropped: {record.dropped}"


def _mean(values: Sequence[Value]) -> float:
    numbers = [value if isinstance(value, int | float) else 0.0 for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0
