"""Another reward or credit configuration, tried on recorded rollouts: what training would have made of them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

from agl_core.config import CONFIG_FILE, LoadedConfig
from agl_core.errors import ConfigError, StoreRefusedError, nearest
from agl_core.learning import PolicyCredit, make_batches, score_all, score_groups
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.reading.explained import GroupCredit, TerminalReward, reward_weights, superseded
from agl_core.reading.importing import import_file
from agl_core.reading.runs import find_run, has_store, open_store
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
    """A recorded value, and that of the tried configuration."""

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
        return any(change.changed for change in (self.reward, self.credit, self.advantage, *self.rewards))


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
    """The changes that a configuration would make."""

    run: Path
    """The folder, or the file of episodes."""
    rollouts: Sequence[RolloutChange]
    mean_reward: Change
    """Over all tried rollouts; one that is dropped counts as 0, as in `reward/mean`."""
    incomplete_groups: Mapping[str, int]
    """By group: how many members are not done. Credit is computed without them."""
    failures: Sequence[str]
    """Errors of reward rules, by rule and rollout; those rollouts would be dropped."""


def try_rewards(
    loaded: LoadedConfig, config: Path, run: Path | None, ids: Sequence[str] = (), step: int | None = None
) -> Coroutine[Any, Any, Trial]:
    """Score recorded rollouts as `loaded`, the configuration in the file `config`, says, and credit those of training.

    `run` is a run, or a file that `agl import` takes; None: the newest run of the configuration. The rollouts are those
    whose ids begin with one of `ids`, or those of a training step, by default the last complete one; of a file, all.
    Each is credited with the members of its group. Nothing is written. ConfigError if there is nothing to try, or if
    the configuration lacks a policy that training rollouts were sampled from; PluginError if a credit rule fails.
    """
    if run is not None and run.is_file():
        return _try_file(run, loaded, ids, step)
    folder = _run_of(config, loaded) if run is None else find_run(run)
    return try_run(folder, open_store(folder), loaded, ids, step)


async def _try_file(file: Path, loaded: LoadedConfig, ids: Sequence[str], step: int | None) -> Trial:
    with TemporaryDirectory(prefix="agl-try-") as folder:
        imported = await import_file(file, "episodes", Path(folder))
        return await try_run(file, open_store(imported.run), loaded, ids, step, whole=not ids and step is None)


async def try_run(
    run: Path,
    opened: Store,
    loaded: LoadedConfig,
    ids: Sequence[str] = (),
    step: int | None = None,
    *,
    whole: bool = False,
) -> Trial:
    """`try_rewards` on the run at `run`, by its store; `whole`: on everything that is done."""
    async with opened as store:
        chosen = await store.rollouts(state=RolloutState.DONE) if whole else await _chosen(store, run, ids, step)
        groups, incomplete = await _groups(store, chosen)
        everyone = [*(r for group in groups for r in group), *(r for r in chosen if not r.mode.trains)]
        scored, failures = await _scored(loaded, await recorded_episodes(store, everyone, loaded.plugins.hook))
        recorded = await _recorded(store, everyone)
    episodes = {episode.rollout: episode for episode in scored}
    in_training = {
        id: replace(episode, dropped=DropReason.STALE) if recorded[id].stale and episode.dropped is None else episode
        for id, episode in episodes.items()
    }
    of_groups = [[in_training[member.id] for member in group] for group in groups]
    credit_before = {key: value for record in recorded.values() for key, value in record.credit.items()}
    before = _Training(credit_before, _advantages(credit_before, of_groups))
    credit_after = _credited(loaded, of_groups)
    after = _Training(credit_after, _advantages(credit_after, of_groups))
    changes = [_rollout_change(episodes[r.id], recorded[r.id], before, after) for r in chosen]
    mean = Change(_mean([c.terminal.before for c in changes]), _mean([c.terminal.after for c in changes]))
    return Trial(run, changes, mean, incomplete, failures)


def _run_of(file: Path, loaded: LoadedConfig) -> Path:
    """The run that has this file as its configuration, else the newest of the configuration's name."""
    runs, name = loaded.config.runs, loaded.config.name
    if file.name == CONFIG_FILE and has_store(file.parent):
        return file.parent
    folders = [path.parent for path in runs.glob(f"*/{CONFIG_FILE}")]
    of_name = [folder for folder in folders if re.fullmatch(re.escape(name) + r"(-\d+)?", folder.name)]
    if not of_name:
        raise ConfigError(
            f"There is no run '{name}' below {runs}. {nearest(name, (folder.name for folder in folders))} "
            f"Name a run's folder with --run, or train first: agl train {file}."
        )
    return max(of_name, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime)


async def _chosen(store: Store, run: Path, ids: Sequence[str], step: int | None) -> list[Rollout]:
    """The rollouts to try."""
    if ids:
        named = [rollout for name in ids for rollout in await _named(store, run, name)]
        return list({rollout.id: rollout for rollout in named}.values())
    runs = await store.runs()

    async def trained(step: int | None) -> list[Rollout]:
        return [r for r in await store.rollouts(step=step, mode=Mode.TRAIN) if not superseded(r, runs)]

    rollouts = await trained(step)
    if step is not None:
        if not rollouts:
            steps = {rollout.step for rollout in await trained(None)}
            known = f"{min(steps)} to {max(steps)}" if steps else "none"
            raise ConfigError(f"{run} has no training rollouts of step {step}. Its training steps: {known}.")
        if not _is_complete(rollouts):
            raise ConfigError(
                f"Step {step} of {run} did not come to its end. Wait for it, choose an earlier step, or name "
                f"rollouts that are done: agl rollouts {run} --step {step}."
            )
        return rollouts
    if not rollouts and (recorded := await store.rollouts(state=RolloutState.DONE)):
        return [rollout for rollout in recorded if rollout.counted_attempt is not None]
    by_step: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_step.setdefault(rollout.step, []).append(rollout)
    complete = [number for number, of_step in by_step.items() if _is_complete(of_step)]
    if not complete:
        raise ConfigError(f"{run} has no training step that came to its end. See agl rollouts {run}.")
    return by_step[max(complete)]


def _is_complete(rollouts: Sequence[Rollout]) -> bool:
    return all(r.state is RolloutState.DONE and r.ending is not Ending.CANCELLED for r in rollouts)


async def _named(store: Store, run: Path, name: str) -> list[Rollout]:
    """The rollouts of a group, or the one, that the user names; ConfigError says why it cannot be tried."""
    runs = await store.runs()
    members = await store.rollouts(group=name)
    of_group = [r for r in members if not superseded(r, runs) and r.counted_attempt is not None]
    if of_group:
        return of_group
    try:
        rollout = await store.rollout(name)
    except StoreRefusedError:
        known = [r.id for r in await store.rollouts()]
        if any(id.startswith(name) for id in known):
            raise
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{run} has no rollout '{name}'. {hint}See agl rollouts {run}.") from None
    if rollout.state is not RolloutState.DONE:
        raise ConfigError(f"{rollout.id} is not done, it is {rollout.state.value}. Try it when it is, or name another.")
    if rollout.counted_attempt is None:
        ending = rollout.ending.value if rollout.ending else "stopped"
        raise ConfigError(f"{rollout.id} never finished (it was {ending}), so there is nothing to score. Name another.")
    return [rollout]


async def _groups(store: Store, chosen: Sequence[Rollout]) -> tuple[list[list[Rollout]], dict[str, int]]:
    """The groups of the training rollouts among these, done members only, and how many of each are not done."""
    by_group: dict[tuple[str, str], list[Rollout]] = {(r.group, r.run): [] for r in chosen if r.mode.trains}
    for run, step in {(r.run, r.step) for r in chosen if r.mode.trains}:
        for member in await store.rollouts(run=run, step=step):
            if member.mode.trains and (member.group, run) in by_group:
                by_group[member.group, run].append(member)
    groups, incomplete = [], {}
    for (name, _), members in sorted(by_group.items()):
        groups.append(sorted((m for m in members if m.state is RolloutState.DONE), key=lambda m: m.member))
        if len(groups[-1]) < len(members):
            incomplete[name] = len(members) - len(groups[-1])
    return groups, incomplete


async def _scored(loaded: LoadedConfig, episodes: Sequence[Episode]) -> tuple[list[Episode], tuple[str, ...]]:
    """The episodes with their rewards, and the errors of rules, equal ones once."""
    rules, endings = scoring_rules(loaded), loaded.config.train.endings
    scored = await score_groups(await score_all(episodes, rules, endings), rules, endings)
    alike: dict[str, list[Exception]] = {}
    for error in (error for _, errors in scored for error in errors):
        alike.setdefault(f"{type(error).__name__}: {error}", []).append(error)
    failures = (
        f"{errors[0].__notes__[-1]} {text}" + (f" ({len(errors)} times in all)" if len(errors) > 1 else "")
        for text, errors in alike.items()
    )
    return [episode for episode, _ in scored], tuple(failures)


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
    credit: dict[TransitionKey, Value] = {record.key: _credit(record) for record in prepared.dropped}
    for batch in prepared.batches.values():
        credit |= dict(zip(batch.keys, batch.values_N.tolist(), strict=True))
    return credit


def _advantages(
    credit: Mapping[TransitionKey, Value], groups: Sequence[Sequence[Episode]]
) -> dict[TransitionKey, float]:
    """The advantages that follow from the credit of these groups; policies are compared each on its own."""
    advantages: dict[TransitionKey, float] = {}
    for group in groups:
        by_policy: dict[str, dict[TransitionKey, float]] = {}
        for transition in (t for episode in group for t in episode.transitions):
            if isinstance(value := credit.get(transition.key), float):
                by_policy.setdefault(transition.policy, {})[transition.key] = value
        for policy, values in by_policy.items():
            of_rollouts: dict[str, list[float]] = {}
            for key, value in values.items():
                of_rollouts.setdefault(key.rollout, []).append(value)
            of = GroupCredit.of(0, policy, of_rollouts)
            advantages |= {key: (v - of.mean) / of.std if of.std else 0.0 for key, v in values.items()}
    return advantages


class _Training(NamedTuple):
    """What training made of transitions, or would make."""

    credit: Mapping[TransitionKey, Value]
    advantage: Mapping[TransitionKey, float]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The records of one rollout."""

    rewards: Sequence[Reward]
    terminal: Value
    credit: Mapping[TransitionKey, Value]
    """Of the transitions that a step used."""
    stale: bool
    """Training left it out for its age: other rewards would not change that."""


async def _recorded(store: Store, rollouts: Sequence[Rollout]) -> dict[str, _Recorded]:
    keys = counted_attempts(rollouts)
    rewards = by_rollout(await store.rewards(keys))
    records = by_rollout(await store.training_records(keys))
    weights = {(run.id, run.restart): reward_weights(run) for run in await store.runs()}

    def recorded(rollout: Rollout) -> _Recorded:
        given, uses = rewards.get(rollout.id, []), records.get(rollout.id, [])
        terminal: Value = TerminalReward.of(given, weights.get((rollout.run, rollout.restart), {})).value
        if terminal is None and uses:
            terminal = 0.0
        if reasons := {str(use.dropped) for use in uses if use.credit is None and use.dropped not in _SCORED}:
            terminal = f"dropped: {min(reasons)}"
        stale = any(use.dropped == DropReason.STALE for use in uses)
        return _Recorded(given, terminal, {use.key: _credit(use) for use in uses}, stale)

    return {rollout.id: recorded(rollout) for rollout in rollouts}


def _rollout_change(episode: Episode, recorded: _Recorded, before: _Training, after: _Training) -> RolloutChange:
    now: Value = episode.terminal if episode.dropped is None else f"dropped: {episode.dropped.value}"
    was = now if recorded.terminal is None and isinstance(now, str) else recorded.terminal
    terminal = Change(was, now)
    rewards = _reward_changes(*([r for r in each if r.call is None] for each in (recorded.rewards, episode.rewards)))
    transitions = [_transition_change(t, recorded, before, after) for t in episode.transitions]
    left_out = len(recorded.credit.keys() - {t.key for t in episode.transitions})
    return RolloutChange(
        *(episode.rollout, episode.task.id, episode.mode, episode.ending),
        changed=left_out > 0
        or any([terminal.changed, *(r.changed for r in rewards), *(t.changed for t in transitions)]),
        terminal=terminal,
        rewards=rewards,
        transitions=transitions,
        left_out=left_out,
    )


def _transition_change(
    transition: Transition, recorded: _Recorded, before: _Training, after: _Training
) -> TransitionChange:
    key = transition.key
    own = [r for r in recorded.rewards if (r.call, r.choice) == (key.call, key.choice) and r.source != AGENT_SOURCE]
    return TransitionChange(
        *(transition.turn, transition.agent, key.call, key.choice, transition.tool_results),
        rewards=_reward_changes(own, transition.rewards),
        reward=Change(sum(reward.value for reward in own), transition.reward),
        credit=Change(before.credit.get(key), after.credit.get(key)),
        advantage=Change(before.advantage.get(key), after.advantage.get(key)),
    )


def _reward_changes(before: Sequence[Reward], after: Sequence[Reward]) -> list[RewardChange]:
    """Each name and source once, in their order."""
    was, now = ({(r.name, r.source): r.value for r in rewards} for rewards in (before, after))
    return [RewardChange(was.get(key), now.get(key), *key) for key in {**was, **now}]


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
