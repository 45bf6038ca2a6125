"""Rollouts explained: their attempts turn by turn, their rewards, and the credit of their group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_core.errors import StoreRefusedError
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.store import Store
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Episode,
    LineageKind,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Symptom,
    TrainingRecord,
    Transition,
    are_equal,
)
from agl_server.health.certificate import Certificate, certify
from agl_server.health.rollouts import RolloutHealth, health_of
from agl_server.reading.runs import open_store
from agl_server.training.lineages import episode_of
from agl_server.training.rollouts import by_attempt, counted_attempts, read_attempts, uncounted_rewards


@dataclass(frozen=True, slots=True)
class GroupCredit:
    """The credit that one step gave the transitions of a group, of one policy."""

    step: int
    policy: str
    credit: Mapping[str, Sequence[float]]
    """The credit of the transitions that reached the algorithm, by rollout."""
    mean: float
    """The mean over rollouts, each of which counts once: 1/G · Σ_i 1/T_i · Σ_t v_it."""
    std: float
    """The unbiased deviation over rollouts: √(1/(G−1) · Σ_i 1/T_i · Σ_t (v_it − mean)²); 0 for one rollout."""

    @classmethod
    def of(cls, step: int, policy: str, credit: Mapping[str, Sequence[float]]) -> GroupCredit:
        mean = math.fsum(math.fsum(values) / len(values) for values in credit.values()) / len(credit)
        if are_equal(value for values in credit.values() for value in values):
            return cls(step, policy, credit, mean, 0.0)
        squares = [math.fsum((v - mean) ** 2 for v in values) / len(values) for values in credit.values()]
        return cls(step, policy, credit, mean, math.sqrt(math.fsum(squares) / max(len(squares) - 1, 1)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One transition with its rewards, and what the step that used it made of it."""

    transition: Transition
    rewards: Sequence[Reward]
    """The rewards that rules gave."""
    reported: Sequence[Reward]
    """Rewards of the agent; they count only if a rule passes them on."""
    record: TrainingRecord | None
    depth: int = 0
    """0 for the main thread, 1 for a sub-agent of it, …"""
    origin: str = ""
    """Its conversation, in words; empty for the first one."""

    @property
    def certificate(self) -> Certificate | None:
        """The proof of its tokens; None if they were not trained on."""
        return None if self.record is None else certify(self.transition, self.record)


@dataclass(frozen=True, slots=True)
class TerminalReward:
    """The terminal reward of an attempt, and where it comes from."""

    value: float | None
    """The weighted sum of its parts; None without one."""
    parts: Sequence[tuple[float, Reward]]
    """The rewards of rules, each with its weight."""
    reported: Sequence[Reward]
    """Rewards of the agent; they count only if a rule passes them on."""

    @classmethod
    def of(cls, rewards: Sequence[Reward], weights: Mapping[str, float]) -> TerminalReward:
        """From rewards, those of calls left out; a rule that `weights` does not name has the weight 1."""
        terminal = [reward for reward in rewards if reward.call is None]
        parts = [(weights.get(r.source, 1.0), r) for r in terminal if r.source != AGENT_SOURCE]
        value = math.fsum(weight * reward.value for weight, reward in parts) if parts else None
        return cls(value, parts, [reward for reward in terminal if reward.source == AGENT_SOURCE])


@dataclass(frozen=True, slots=True)
class AttemptReport:
    attempt: Attempt
    episode: Episode
    training_records: Sequence[TrainingRecord]

    @property
    def health(self) -> RolloutHealth:
        return health_of(self.episode)

    @property
    def turns(self) -> list[Turn]:
        records = {record.key: record for record in self.training_records}
        said = [reward for reward in self.episode.rewards if reward.source == AGENT_SOURCE]
        turns: dict[str | None, int] = {None: -1}
        depths: dict[str | None, int] = {None: 0}
        explained = []
        for t in self.episode.delivered:
            call, parent = t.key.call, t.lineage.parent
            is_inside = t.housekeeping is not None or t.lineage.kind is LineageKind.SUB_AGENT
            turns[call], depths[call] = t.turn, depths.get(parent, 0) + is_inside
            reported, origin = [r for r in said if r.call == call], _origin(t, turns.get(parent, -1))
            explained.append(Turn(t, self.rewards_of(t), reported, records.get(t.key), depths[call], origin))
        return explained

    @property
    def conversations(self) -> str:
        """How many there are of each kind, and how much housekeeping; empty for one conversation alone."""
        first = {t.lineage.number: t.lineage.kind for t in self.episode.transitions}
        marks = Counter(mark for t in self.episode.housekeeping if (mark := t.housekeeping) is not None)
        kinds = [f"{count} {kind.replace('_', '-')}" for kind, count in Counter(first.values()).items()]
        told = f"{marks.total()} housekeeping (by {', by '.join(f'{m} {n}' for m, n in marks.items())})"
        return ", ".join([*kinds, *([told] if marks else [])]) if marks or len(first) > 1 else ""

    def rewards_of(self, transition: Transition) -> list[Reward]:
        key, by_rules = transition.key, (reward for reward in self.episode.rewards if reward.source != AGENT_SOURCE)
        return [reward for reward in by_rules if (reward.call, reward.choice) == (key.call, key.choice)]

    @property
    def uncounted_rewards(self) -> list[Reward]:
        return uncounted_rewards(self.episode)

    def terminal(self, weights: Mapping[str, float]) -> TerminalReward:
        """The terminal reward by the weights of the run's rules."""
        return TerminalReward.of(self.episode.rewards, weights)


@dataclass(frozen=True, slots=True)
class RolloutEntry:
    """One rollout, without its calls."""

    rollout: Rollout
    superseded: bool
    """A later restart went on from before its step."""
    weights: Mapping[str, float]
    """The weights of the run's reward rules in the terminal reward, by name."""
    attempt: Attempt | None
    """The one that counts. Rewards and training records are of this one."""
    rewards: Sequence[Reward]
    training_records: Sequence[TrainingRecord]

    @property
    def reward(self) -> float | None:
        """The terminal reward: the weighted sum of those that rules gave; None without one."""
        return TerminalReward.of(self.rewards, self.weights).value


@dataclass(frozen=True, slots=True)
class RolloutReport:
    entry: RolloutEntry
    attempts: Sequence[AttemptReport]
    """All of them, also those that do not count."""

    @property
    def counted(self) -> AttemptReport | None:
        return next((a for a in self.attempts if a.attempt.attempt == self.entry.rollout.counted_attempt), None)

    @property
    def health(self) -> RolloutHealth | None:
        """Its verdict with the reasons; None as long as it is not done."""
        if self.entry.rollout.state is not RolloutState.DONE:
            return None
        return RolloutHealth(symptoms=(Symptom.ENDING,)) if self.counted is None else self.counted.health


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A rollout, and those that it was compared with."""

    chosen: RolloutReport
    members: Sequence[RolloutReport]
    """All of the group, the chosen one too."""
    credit: Sequence[GroupCredit]
    """For each step that trained on the group, and each policy."""
    config: Mapping[str, object]
    """The run's configuration at that time."""


async def read_group(folder: Path, prefix: str) -> GroupReport:
    """The rollout whose id starts with `prefix`, with its group. StoreError if there is none, or more than one."""
    async with open_store(folder) as store:
        rollout = await store.rollout(prefix)
        members = await reports_of(store, await members_of(store, rollout))
        configs = {(run.id, run.restart): run.config for run in await store.runs()}
    chosen = next(member for member in members if member.entry.rollout.id == rollout.id)
    return GroupReport(chosen, members, _group_credit(members), configs.get((rollout.run, rollout.restart), {}))


async def read_call(folder: Path, prefix: str, attempt: int, call_id: str) -> Call:
    """One call of the rollout whose id starts with `prefix`, as it was recorded. StoreError if there is none."""
    async with open_store(folder) as store:
        rollout = await store.rollout(prefix)
        for call in await store.calls([AttemptKey(rollout.id, attempt)]):
            if call.id == call_id:
                return call
    raise StoreRefusedError(
        f"Attempt {attempt} of {rollout.id} has no call {call_id!r}. `agl show {rollout.id}` shows them."
    )


async def members_of(store: Store, rollout: Rollout) -> list[Rollout]:
    """The rollouts that are compared with this one, itself included, in their order."""
    members = await store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
    return sorted((m for m in members if m.restart == rollout.restart), key=lambda member: member.member)


def _origin(transition: Transition, parent_turn: int) -> str:
    """The conversation of a transition, in words; `parent_turn` is -1 if it branched from no call that counts."""
    kind, number = transition.lineage.kind, transition.lineage.number
    if transition.housekeeping is not None:
        return f"housekeeping (by {transition.housekeeping})"
    name = f"conversation {number}" if kind is LineageKind.MAIN else kind.replace("_", "-")
    parent = f" of turn {parent_turn}" if parent_turn >= 0 else ""
    return f"{name}{parent}, its turn {transition.agent_turn}" if number else ""


def _group_credit(members: Sequence[RolloutReport]) -> list[GroupCredit]:
    by_step: dict[tuple[int, str], dict[str, list[float]]] = {}
    for attempt in (member.counted for member in members if member.counted is not None):
        policies = {t.key.call: t.policy for t in attempt.episode.transitions}
        for record in attempt.training_records:
            if record.credit is not None and record.advantage is not None:
                of_step = by_step.setdefault((record.step, policies.get(record.call, "")), {})
                of_step.setdefault(record.rollout, []).append(record.credit)
    return [GroupCredit.of(step, policy, credit) for (step, policy), credit in sorted(by_step.items())]


async def entries_of(store: Store, rollouts: Sequence[Rollout]) -> list[RolloutEntry]:
    keys, runs = counted_attempts(rollouts), await store.runs()
    attempts = {attempt.key: attempt for attempt in await store.attempts(*(key.rollout for key in keys))}
    rewards, records = by_attempt(await store.rewards(keys)), by_attempt(await store.training_records(keys))
    weights = {
        (run.id, run.restart): {name: float(rule["weight"]) for name, rule in run.config.get("rewards", {}).items()}
        for run in runs
    }

    def entry(rollout: Rollout) -> RolloutEntry:
        key = AttemptKey(rollout.id, -1 if rollout.counted_attempt is None else rollout.counted_attempt)
        rules, superseded = weights.get((rollout.run, rollout.restart), {}), is_superseded(rollout, runs)
        return RolloutEntry(rollout, superseded, rules, attempts.get(key), rewards[key], records[key])

    return [entry(rollout) for rollout in rollouts]


async def reports_of(store: Store, rollouts: Sequence[Rollout]) -> list[RolloutReport]:
    """Everything that is recorded of these rollouts, in their order."""
    recorded = await read_attempts(store, rollouts, await store.attempts(*(rollout.id for rollout in rollouts)))
    training_records = by_attempt(await store.training_records([*recorded]))
    reports: dict[str, list[AttemptReport]] = {rollout.id: [] for rollout in rollouts}
    for key, records in recorded.items():
        report = AttemptReport(records.attempt, episode_of(records), training_records[key])
        reports[key.rollout].append(report)
    return [RolloutReport(entry, reports[entry.rollout.id]) for entry in await entries_of(store, rollouts)]


def is_superseded(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """True if a later restart resumed from before this rollout's step."""
    return any(
        r.id == rollout.run
        and r.restart > rollout.restart
        and r.resumed_step is not None
        and rollout.mode.trains
        and rollout.step > r.resumed_step
        for r in runs
    )
