"""Another reward or credit configuration, tried on recorded rollouts: what training would have made of them."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from agl_core.config.load import CONFIG_FILE, LoadedConfig
from agl_core.errors import ConfigError, nearest
from agl_core.learning.batch import BatchPlan, make_batches
from agl_core.learning.rewards import AGENT_SOURCE, try_rules
from agl_core.store import Store
from agl_core.types import (
    DropReason,
    Ending,
    Episode,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    TrainingRecord,
    Transition,
    TransitionKey,
)
from agl_server.reading.explained import RolloutEntry, entries_of, is_superseded, members_of
from agl_server.reading.files import is_recording
from agl_server.reading.importing import import_file
from agl_server.reading.runs import find_run, is_capture, is_run, open_store, run_folders
from agl_server.training.rollouts import recorded_episodes, scoring_rules

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
    """They differ by more than rounding."""

    def __post_init__(self) -> None:
        changed = self.before != self.after
        if isinstance(self.before, int | float) and isinstance(self.after, int | float):
            both_nan = math.isnan(self.before) and math.isnan(self.after)
            changed = not both_nan and not math.isclose(self.before, self.after, rel_tol=1e-9, abs_tol=1e-12)
        object.__setattr__(self, "changed", changed)


@dataclass(frozen=True)
class RewardChange(Change):
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class TransitionChange:
    rewards: Sequence[RewardChange]
    reward: Change
    """The sum of its intermediate rewards."""
    credit: Change

    @property
    def changed(self) -> bool:
        return any(change.changed for change in (self.reward, self.credit, *self.rewards))


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """One rollout. Only training gives credit; what was recorded is None if the step ended before the update."""

    episode: Episode
    """As the tried configuration scores it."""
    terminal: Change
    """R, or the reason why the episode is dropped."""
    rewards: Sequence[RewardChange]
    """The parts of the terminal reward, each before its weight; also what the agent reported, which stays."""
    transitions: Sequence[TransitionChange]
    """In the order of the episode's."""

    @property
    def changed(self) -> bool:
        parts: Sequence[Change | TransitionChange] = (self.terminal, *self.rewards, *self.transitions)
        return any(part.changed for part in parts)


@dataclass(frozen=True, slots=True)
class Trial:
    run: Path
    """The folder, or the file of episodes."""
    rollouts: Sequence[RolloutChange]
    mean_reward: Change
    """Over all tried rollouts; one that is dropped counts as 0, as in `reward/mean`."""
    unfinished: int
    """The number of rollouts of their groups that are not done. Credit is computed without them."""
    failures: Sequence[str]
    """Errors of reward rules, by rule and rollout; those rollouts would be dropped."""


def try_rewards(
    loaded: LoadedConfig, config: Path, run: Path | None, ids: Sequence[str] = (), step: int | None = None
) -> Trial:
    """Score recorded rollouts as `loaded`, the configuration in the file `config`, says, and credit those of training.

    `run` is a run, or a file that `agl import` takes; None: the configuration's newest run. `ids` are groups or
    beginnings of rollouts' ids; without them it is a training step, by default the last complete one. ConfigError if
    there is nothing to try, or the configuration lacks a sampled policy; PluginError if a credit rule fails.
    """
    if run is not None and is_recording(run):
        with TemporaryDirectory(prefix="agl-try-") as folder:
            imported = import_file(run, "episodes", Path(folder))
            return replace(asyncio.run(_try(imported.run, loaded, ids, step)), run=run)
    return asyncio.run(_try(_run_of(config, loaded) if run is None else find_run(run), loaded, ids, step))


async def _try(run: Path, loaded: LoadedConfig, ids: Sequence[str], step: int | None) -> Trial:
    async with open_store(run) as store:
        chosen = await _chosen(store, run, ids, step)
        elsewhere = is_capture(run)  # So its rollouts are no evaluations: those of a task are compared.
        one_of = {(r.group, r.run, r.mode): r for r in chosen if r.mode.trains or elsewhere}
        groups = [await members_of(store, rollout) for _, rollout in sorted(one_of.items())]
        done = [[member for member in group if member.state is RolloutState.DONE] for group in groups]
        unfinished = sum(map(len, groups)) - sum(map(len, done))
        everyone = [*(r for group in done for r in group), *(r for r in chosen if not (r.mode.trains or elsewhere))]
        recorded = await recorded_episodes(store, everyone, loaded.plugins.hook, loaded.config.train.housekeeping)
        scored, failures = await try_rules(recorded, scoring_rules(loaded), loaded.config.train.endings, elsewhere)
        entries = {entry.rollout.id: entry for entry in await entries_of(store, everyone)}
    records = [record for entry in entries.values() for record in entry.training_records]
    episodes = {episode.rollout: episode for episode in scored}
    # Training left these out for their age: other rewards would not change that.
    stale = {record.rollout for record in records if record.dropped == DropReason.STALE}
    in_training = {
        id: replace(episode, dropped=DropReason.STALE) if id in stale and episode.dropped is None else episode
        for id, episode in episodes.items()
    }
    before = {record.key: _credit(record) for record in records}
    after = _credited(loaded, [[in_training[m.id] for m in group] for group in done if group[0].mode.trains])
    credit = {key: Change(before.get(key), after.get(key)) for key in {**before, **after}}
    changes = [_rollout_change(episodes[r.id], entries[r.id], credit) for r in chosen if r.id in episodes]
    mean = Change(_mean([c.terminal.before for c in changes]), _mean([c.terminal.after for c in changes]))
    return Trial(run, changes, mean, unfinished, failures)


def _run_of(file: Path, loaded: LoadedConfig) -> Path:
    """The run that has this file as its configuration, else the newest of the configuration's name."""
    runs, name = loaded.config.runs, loaded.config.name
    if file.name == CONFIG_FILE and is_run(file.parent):
        return file.parent
    folders = run_folders(runs)
    of_name = [folder for folder in folders if re.fullmatch(re.escape(name) + r"(-\d+)?", folder.name)]
    if not of_name:
        raise ConfigError(
            f"There is no run '{name}' below {runs}. {nearest(name, (folder.name for folder in folders))} "
            f"Name a run's folder with --run, or train first: agl train {file}."
        )
    return of_name[-1]


async def _chosen(store: Store, run: Path, ids: Sequence[str], step: int | None) -> list[Rollout]:
    runs = await store.runs()
    of_training = [] if ids else await store.rollouts(step=step, mode=Mode.TRAIN)
    trained = [rollout for rollout in of_training if not is_superseded(rollout, runs)]
    if ids:
        named = [r for name in ids for r in await store.rollouts(group=name) or [await store.rollout(name)]]
        rollouts = list({rollout.id: rollout for rollout in named}.values())
    elif step is None and (is_capture(run) or not trained):
        rollouts = await store.rollouts(state=RolloutState.DONE)
    else:
        unfinished = {r.step for r in trained if r.state is not RolloutState.DONE or r.ending is Ending.CANCELLED}
        chosen = max({r.step for r in trained} - unfinished, default=0) if step is None else step
        rollouts = [r for r in trained if r.step == chosen]
    tried = [r for r in rollouts if r.counted_attempt is not None and not is_superseded(r, runs)]
    if not tried:
        raise ConfigError(f"{run} has no such rollout that has ended. See agl rollouts {run}.")
    return tried


def _credited(loaded: LoadedConfig, groups: Sequence[Sequence[Episode]]) -> dict[TransitionKey, Value]:
    """The credit of each transition by the configured rules, as training records it, or the reason for none."""
    unknown = {t.policy for group in groups for e in group for t in e.transitions} - loaded.policies.keys()
    if unknown:
        raise ConfigError(
            f"The recorded calls were answered by policy '{min(unknown)}', which the configuration does not have. "
            f"{nearest(min(unknown), loaded.policies)}"
        )
    without_logprobs = loaded.trains_on_texts or bool(loaded.config.tasks["train"].settings.get("without_logprobs"))
    prepared = make_batches(groups, BatchPlan.configured(loaded, without_logprobs=without_logprobs))
    credit: dict[TransitionKey, Value] = {record.key: _credit(record) for record in prepared.dropped}
    for batch in prepared.batches.values():
        credit |= dict(zip(batch.keys, batch.values_N.tolist(), strict=True))
    return credit


def _rollout_change(episode: Episode, entry: RolloutEntry, credit: Mapping[TransitionKey, Change]) -> RolloutChange:
    after: Value = episode.terminal if episode.dropped is None else f"dropped: {episode.dropped.value}"
    before = _recorded_terminal(entry)
    terminal = Change(after if before is None and isinstance(after, str) else before, after)
    parts = ([reward for reward in rewards if reward.call is None] for rewards in (entry.rewards, episode.rewards))
    rewards = _reward_changes(*parts)
    transitions = [_transition_change(transition, entry, credit) for transition in episode.transitions]
    return RolloutChange(episode, terminal, rewards, transitions)


def _transition_change(
    transition: Transition, entry: RolloutEntry, credit: Mapping[TransitionKey, Change]
) -> TransitionChange:
    key = transition.key
    own = [r for r in entry.rewards if (r.call, r.choice) == (key.call, key.choice) and r.source != AGENT_SOURCE]
    reward = Change(sum(reward.value for reward in own), transition.reward)
    rewards = _reward_changes(own, transition.rewards)
    return TransitionChange(rewards, reward, credit.get(key, Change(None, None)))


def _recorded_terminal(entry: RolloutEntry) -> Value:
    """R as it was in training: 0 for what was trained on without one, or the reason why it was dropped unscored."""
    reasons = {str(r.dropped) for r in entry.training_records if r.credit is None and r.dropped not in _SCORED}
    if reasons:
        return f"dropped: {min(reasons)}"
    return 0.0 if entry.reward is None and entry.training_records else entry.reward


def _reward_changes(before: Sequence[Reward], after: Sequence[Reward]) -> list[RewardChange]:
    """Each name and source once, in their order."""
    was, now = ({(r.name, r.source): r.value for r in rewards} for rewards in (before, after))
    return [RewardChange(was.get(key), now.get(key), *key) for key in {**was, **now}]


def _credit(record: TrainingRecord) -> Value:
    return record.credit if record.credit is not None else f"dropped: {record.dropped}"


def _mean(values: Sequence[Value]) -> float:
    numbers = [value if isinstance(value, int | float) else 0.0 for value in values]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0
