"""Another reward or credit configuration, tried on recorded rollouts: what training would have made of them."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from agl_core.analysis.rollouts import GroupCredit, reward_weights, terminal_reward
from agl_core.analysis.runs import find_run, open_store
from agl_core.analysis.trials.choosing import chosen_episodes, chosen_rollouts, run_of
from agl_core.config import LoadedConfig
from agl_core.errors import ConfigError, nearest
from agl_core.learning import PolicyCredit, make_batches, score_all, score_groups
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.store.interface import Store
from agl_core.training.rollouts import by_rollout, counted_attempts, recorded_episodes, scoring_rules
from agl_core.types import (
    DropReason,
    Ending,
    Episode,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    ToolResult,
    TrainingRecord,
    Transition,
    TransitionKey,
)

Value: TypeAlias = float | str | None
"""A reward or a credited value; a text with the reason if it was dropped; None if there is none."""

_SCORED = frozenset({DropReason.GROUP_TOO_SMALL, DropReason.NO_TRANSITION, DropReason.STALE})
"""Reasons for which an episode is left out although rules scored it."""


@dataclass(frozen=True)
class Change:
    """What was recorded, and what the tried configuration makes of it."""

    before: Value
    after: Value
    changed: bool = field(init=False)
    """Whether they differ by more than rounding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "changed", _differ(self.before, self.after))


@dataclass(frozen=True)
class RewardChange(Change):
    """One named reward, by its provenance."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class TransitionChange:
    """One transition's intermediate reward and credit."""

    turn: int
    agent: str | None
    call: str
    choice: int
    tool_results: Sequence[ToolResult]
    rewards: Sequence[RewardChange]
    reward: Change
    """The sum of its intermediate rewards."""
    credit: Change
    advantage: Change
    """GRPO's: credit minus the mean of its group, divided by the deviation; 0 where these are equal."""

    @property
    def changed(self) -> bool:
        changes = (self.reward, self.credit, self.advantage, *self.rewards)
        return any(each.changed for each in changes)


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """One rollout. Its recorded credit is None if its step ended before the update.

    Only rollouts of training get credit: that of a capture or of an evaluation is None.
    """

    rollout: str
    task: str
    mode: Mode
    ending: Ending
    changed: bool
    terminal: Change
    """R, or the reason why the episode is dropped."""
    rewards: Sequence[RewardChange]
    """The parts of the terminal reward, each before its weight; also what the agent reported, which stays."""
    transitions: Sequence[TransitionChange]
    left_out: int
    """Transitions that were used in training and that the episode no longer has (an `episode_built` hook)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What would change."""

    run: Path
    """The folder, or the file of episodes."""
    rollouts: Sequence[RolloutChange]
    mean_reward: Change
    """Over all tried rollouts; one that is dropped counts as 0, as in `reward/mean`."""
    incomplete_groups: Mapping[str, int]
    """By group: how many members are not done. Credit is computed without them."""
    failures: Sequence[str]
    """What reward rules raised, by rule and rollout; those rollouts would be dropped."""


def try_rewards(
    loaded: LoadedConfig, config: Path, run: Path | None, ids: Sequence[str] = (), step: int | None = None
) -> Coroutine[Any, Any, Trial]:
    """Score recorded rollouts as `loaded`, the configuration in the file `config`, says, and credit those of training.

    `run` is a run, or a file of episodes; None: the newest run of the configuration. The rollouts are those whose ids
    begin with one of `ids`, or those of a training step, by default the last complete one. Each is credited with the
    members of its group. Nothing is written. ConfigError if there is nothing to try, or if the configuration lacks a
    policy that training rollouts were sampled from; PluginError if a credit rule fails.
    """
    if run is not None and run.is_file():
        return _try_episodes(run, loaded, chosen_episodes(run, ids, step))
    folder = run_of(config, loaded) if run is None else find_run(run)
    return try_run(folder, open_store(folder), loaded, ids, step)


async def try_run(
    folder: Path, opened: Store, loaded: LoadedConfig, ids: Sequence[str] = (), step: int | None = None
) -> Trial:
    """`try_rewards` on the run in this folder, by its store."""
    async with opened as store:
        return await _try_rollouts(folder, store, loaded, await chosen_rollouts(store, folder, ids, step))


async def _try_rollouts(folder: Path, store: Store, loaded: LoadedConfig, rollouts: Sequence[Rollout]) -> Trial:
    groups: list[list[Rollout]] = []
    incomplete = {}
    by_group: dict[tuple[str, str], list[Rollout]] = {(r.group, r.run): [] for r in rollouts if r.mode.trains}
    for run, step in {(r.run, r.step) for r in rollouts if r.mode.trains}:
        for member in await store.rollouts(run=run, step=step):
            if (member.group, run) in by_group:
                by_group[member.group, run].append(member)
    for (name, _), members in sorted(by_group.items()):
        done = sorted((m for m in members if m.state is RolloutState.DONE), key=lambda m: m.member)
        groups.append(done)
        if len(done) < len(members):
            incomplete[name] = len(members) - len(done)
    members_of_groups = [r for group in groups for r in group]
    everyone = [*members_of_groups, *(r for r in rollouts if not r.mode.trains)]
    scored, failures = await _scored(loaded, await recorded_episodes(store, everyone, loaded.plugins.hook))
    episodes = {episode.rollout: episode for episode in scored}
    in_training = episodes | {
        id: replace(episodes[id], dropped=DropReason.STALE)
        for id in await _stale(store, everyone)
        if episodes[id].dropped is None
    }
    of_groups = [[in_training[member.id] for member in group] for group in groups]
    after = _Credited.by(_credited(loaded, of_groups), of_groups)
    recorded = await _recorded(store, everyone)
    before = _Credited.by({key: value for r in everyone for key, value in recorded[r.id].credit.items()}, of_groups)
    changes = [_compared(episodes[r.id], recorded[r.id], before, after) for r in rollouts]
    return _trial(folder, changes, failures, incomplete)


async def _try_episodes(file: Path, loaded: LoadedConfig, episodes: Sequence[Episode]) -> Trial:
    """The same for episodes that no store has (`agl_core.load_episodes`); those of one group are credited together."""
    unscored = [loaded.plugins.hook.episode_built(_without_rules(episode)) for episode in episodes]
    scored, failures = await _scored(loaded, unscored)
    groups: dict[str, list[Episode]] = {}
    for episode in scored:
        if episode.mode.trains:
            groups.setdefault(episode.group, []).append(episode)
    credited = _Credited.by(_credited(loaded, list(groups.values())), list(groups.values()))
    changes = [
        _compared(after, _Recorded([*before.rewards, *_of_calls(before)], _terminal(before)), _Credited(), credited)
        for before, after in zip(episodes, scored, strict=True)
    ]
    return _trial(file, changes, failures, {})


def _trial(
    run: Path, changes: Sequence[RolloutChange], failures: Sequence[str], incomplete: Mapping[str, int]
) -> Trial:
    mean = Change(_mean([c.terminal.before for c in changes]), _mean([c.terminal.after for c in changes]))
    return Trial(run, changes, mean, incomplete, failures)


def _credited(loaded: LoadedConfig, groups: Sequence[Sequence[Episode]]) -> dict[TransitionKey, Value]:
    """The credit of each transition by the configured rules, as training records it, or the reason for none."""
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
        without_logprobs=bool(loaded.config.tasks["train"].settings.get("without_logprobs")),
    )
    found: dict[TransitionKey, Value] = {record.key: _credit(record) for record in prepared.dropped}
    for batch in prepared.batches.values():
        found |= dict(zip(batch.keys, batch.values_N.tolist(), strict=True))
    return found


async def _scored(loaded: LoadedConfig, episodes: Sequence[Episode]) -> tuple[list[Episode], tuple[str, ...]]:
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
    """The rollouts that training left out for their age: other rewards would not change that."""
    records = await store.training_records(counted_attempts(rollouts))
    return {record.rollout for record in records if record.dropped == DropReason.STALE}


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What is on record of one rollout."""

    rewards: Sequence[Reward]
    terminal: Value
    credit: Mapping[TransitionKey, Value] = field(default_factory=dict)
    """Of the transitions that a step used."""


@dataclass(frozen=True, slots=True)
class _Credited:
    """What transitions got, or would get."""

    credit: Mapping[TransitionKey, Value] = field(default_factory=dict)
    advantage: Mapping[TransitionKey, float] = field(default_factory=dict)

    @classmethod
    def by(cls, credit: Mapping[TransitionKey, Value], groups: Sequence[Sequence[Episode]]) -> _Credited:
        """The advantages follow from the credit of these groups; policies are compared each on its own."""
        advantage: dict[TransitionKey, float] = {}
        for transitions in (_by_policy(group) for group in groups):
            for policy, keys in transitions.items():
                values = {key: value for key in keys if isinstance(value := credit.get(key), float)}
                of_rollouts: dict[str, list[float]] = {}
                for key, value in values.items():
                    of_rollouts.setdefault(key.rollout, []).append(value)
                if of_rollouts:
                    group = GroupCredit.of(0, policy, of_rollouts)
                    advantage |= {key: (v - group.mean) / group.std if group.std else 0.0 for key, v in values.items()}
        return cls(credit, advantage)


def _by_policy(group: Sequence[Episode]) -> dict[str, list[TransitionKey]]:
    found: dict[str, list[TransitionKey]] = {}
    for transition in (each for episode in group for each in episode.transitions):
        found.setdefault(transition.policy, []).append(transition.key)
    return found


async def _recorded(store: Store, rollouts: Sequence[Rollout]) -> dict[str, _Recorded]:
    keys = counted_attempts(rollouts)
    rewards = by_rollout(await store.rewards(keys))
    records = by_rollout(await store.training_records(keys))
    weights = {(run.id, run.restart): reward_weights(run) for run in await store.runs()}
    return {
        r.id: _Recorded(
            its_rewards := rewards.get(r.id, []),
            _recorded_terminal(its_rewards, uses := records.get(r.id, []), weights.get((r.run, r.restart), {})),
            {record.key: _credit(record) for record in uses},
        )
        for r in rollouts
    }


def _recorded_terminal(
    rewards: Sequence[Reward], training_records: Sequence[TrainingRecord], weights: Mapping[str, float]
) -> Value:
    """The recorded terminal reward, by the weights that the run had."""
    reasons = {record.dropped for record in training_records if record.credit is None} - _SCORED
    if reasons:
        return f"dropped: {min(str(reason) for reason in reasons)}"
    value = terminal_reward([r for r in rewards if r.call is None], weights).value
    return 0.0 if value is None and training_records else value


def _terminal(episode: Episode) -> Value:
    return episode.terminal if episode.dropped is None else f"dropped: {episode.dropped.value}"


def _of_calls(episode: Episode) -> list[Reward]:
    return [reward for transition in episode.transitions for reward in transition.rewards]


def _without_rules(episode: Episode) -> Episode:
    """The episode with the rewards that the agent reported, and without those of rules, which score it again."""

    def reported(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
        return tuple(reward for reward in rewards if reward.source == AGENT_SOURCE)

    transitions = tuple(replace(each, rewards=reported(each.rewards)) for each in episode.transitions)
    return replace(episode, rewards=reported(episode.rewards), transitions=transitions, terminal=None, dropped=None)


def _compared(episode: Episode, recorded: _Recorded, before: _Credited, after: _Credited) -> RolloutChange:
    was, now = recorded.terminal, _terminal(episode)
    terminal = Change(now if was is None and isinstance(now, str) else was, now)
    of_rollout = ([r for r in rewards if r.call is None] for rewards in (recorded.rewards, episode.rewards))
    rewards = _by_provenance(*of_rollout)
    transitions = [_compared_transition(t, recorded, before, after) for t in episode.transitions]
    left_out = len(recorded.credit.keys() - {t.key for t in episode.transitions})
    return RolloutChange(
        rollout=episode.rollout,
        task=episode.task.id,
        mode=episode.mode,
        ending=episode.ending,
        changed=left_out > 0
        or any([terminal.changed, *(r.changed for r in rewards), *(t.changed for t in transitions)]),
        terminal=terminal,
        rewards=rewards,
        transitions=transitions,
        left_out=left_out,
    )


def _compared_transition(
    transition: Transition, recorded: _Recorded, before: _Credited, after: _Credited
) -> TransitionChange:
    key = transition.key
    mine = [r for r in recorded.rewards if (r.call, r.choice) == (key.call, key.choice) and r.source != AGENT_SOURCE]
    return TransitionChange(
        turn=transition.turn,
        agent=transition.agent,
        call=key.call,
        choice=key.choice,
        tool_results=transition.tool_results,
        rewards=_by_provenance(mine, transition.rewards),
        reward=Change(sum(r.value for r in mine), transition.reward),
        credit=Change(before.credit.get(key), after.credit.get(key)),
        advantage=Change(before.advantage.get(key), after.advantage.get(key)),
    )


def _by_provenance(before: Sequence[Reward], after: Sequence[Reward]) -> list[RewardChange]:
    """Each name and source once, in their order."""
    was = {(r.name, r.source): r.value for r in before}
    would_be = {(r.name, r.source): r.value for r in after}
    return [RewardChange(was.get(each), would_be.get(each), *each) for each in {**was, **would_be}]


def _differ(before: Value, after: Value) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        both_nan = math.isnan(before) and math.isnan(after)
        return not both_nan and not math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-12)
    return before != after


def _credit(record: TrainingRecord) -> Value:
    return record.credit if record.credit is not None else f"dropped: {record.dropped}"


def _mean(values: Sequence[Value]) -> float:
    numbers = [value if isinstance(value, int | float) else 0.0 for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0
