"""One rollout explained: its attempts turn by turn, its rewards, and the credit of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl_core.errors import StoreRefusedError
from agl_core.learning.health import RolloutHealth, health_of
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.learning.transitions import build_episode
from agl_core.store.interface import Store
from agl_core.training.rollouts import Recorded, by_rollout, counted_attempts
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Episode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Symptom,
    TrainingRecord,
    Transition,
    are_equal,
)


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
        """The credit of a group, with its mean and deviation."""
        mean = math.fsum(math.fsum(values) / len(values) for values in credit.values()) / len(credit)
        if are_equal(value for values in credit.values() for value in values):
            return cls(step, policy, credit, mean, 0.0)
        squares = [math.fsum((v - mean) ** 2 for v in values) / len(values) for values in credit.values()]
        return cls(step, policy, credit, mean, math.sqrt(math.fsum(squares) / max(len(squares) - 1, 1)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One transition with its rewards, and what each step that used it made of it."""

    transition: Transition
    rewards: Sequence[Reward]
    training_records: Sequence[TrainingRecord]


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
        """That of these rewards, without those of calls; a rule that `weights` does not name has the weight 1."""
        terminal = [reward for reward in rewards if reward.call is None]
        parts = [(weights.get(r.source, 1.0), r) for r in terminal if r.source != AGENT_SOURCE]
        value = math.fsum(weight * reward.value for weight, reward in parts) if parts else None
        return cls(value, parts, [reward for reward in terminal if reward.source == AGENT_SOURCE])


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One attempt at a rollout."""

    attempt: Attempt
    episode: Episode
    training_records: Sequence[TrainingRecord]
    pruned: bool
    """Its calls lost their texts and tokens (`agl runs prune`)."""

    @property
    def health(self) -> RolloutHealth:
        """The verdict on it, with its reasons."""
        return health_of(self.episode, pruned=self.pruned)

    @property
    def turns(self) -> list[Turn]:
        """The transitions in their order."""
        return [
            Turn(t, self.rewards_of(t), [record for record in self.training_records if record.key == t.key])
            for t in self.episode.transitions
        ]

    def rewards_of(self, transition: Transition) -> list[Reward]:
        """The rewards of one transition."""
        key = transition.key
        return [reward for reward in self.episode.rewards if (reward.call, reward.choice) == (key.call, key.choice)]

    @property
    def uncounted_rewards(self) -> list[Reward]:
        """The rewards of calls that are not in the episode."""
        known = {(t.key.call, t.key.choice) for t in self.episode.transitions}
        return [r for r in self.episode.rewards if r.call is not None and (r.call, r.choice) not in known]

    def terminal(self, weights: Mapping[str, float]) -> TerminalReward:
        """The terminal reward by the weights of the run's rules."""
        return TerminalReward.of(self.episode.rewards, weights)


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Everything that is recorded of one rollout."""

    rollout: Rollout
    superseded: bool
    attempts: Sequence[AttemptReport]
    groups: Sequence[GroupCredit]
    """The credit that it was compared with, for each step and policy."""
    weights: Mapping[str, float]
    """The weights of the run's reward rules in the terminal reward, by name."""


async def read_rollout(store: Store, prefix: str) -> RolloutReport:
    """The rollout whose id starts with `prefix`. StoreError if there is none, or more than one."""
    rollout, runs = await store.rollout(prefix), await store.runs()
    attempts = await attempt_reports(store, [(rollout, attempt) for attempt in await store.attempts(rollout.id)])
    weights = next((reward_weights(r) for r in runs if (r.id, r.restart) == (rollout.run, rollout.restart)), {})
    return RolloutReport(rollout, is_superseded(rollout, runs), attempts, await group_credit(store, rollout), weights)


async def read_call(store: Store, prefix: str, attempt: int, call_id: str) -> Call:
    """One call of the rollout whose id starts with `prefix`, as it was recorded. StoreError if there is none."""
    rollout = await store.rollout(prefix)
    for call in await store.calls([AttemptKey(rollout.id, attempt)]):
        if call.id == call_id:
            return call
    raise StoreRefusedError(
        f"Attempt {attempt} of {rollout.id} has no call {call_id!r}. `agl show {rollout.id}` shows them."
    )


async def read_members(store: Store, rollout: Rollout) -> list[Rollout]:
    """The rollouts that were compared with this one, itself included."""
    members = await store.rollouts(run=rollout.run, group=rollout.group, mode=rollout.mode)
    return [member for member in members if member.restart == rollout.restart]


async def group_credit(store: Store, rollout: Rollout) -> list[GroupCredit]:
    """For each step that trained on the rollout's group: the credit of all its members' transitions."""
    members = await read_members(store, rollout)
    keys = counted_attempts(members)
    policies = {call.id: call.policy for call in await store.calls(keys)}
    by_step: dict[tuple[int, str], dict[str, list[float]]] = {}
    for record in await store.training_records(keys):
        if record.credit is not None and record.advantage is not None:
            of_step = by_step.setdefault((record.step, policies.get(record.call, "")), {})
            of_step.setdefault(record.rollout, []).append(record.credit)
    order = {member.id: member.member for member in members}
    return [
        GroupCredit.of(step, policy, dict(sorted(values.items(), key=lambda item: order[item[0]])))
        for (step, policy), values in sorted(by_step.items())
    ]


async def counted_of(store: Store, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Attempt]]:
    """These rollouts, each with its attempt that counts; those without one are left out."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    attempts = await store.attempts(*by_id)
    return [(by_id[a.rollout], a) for a in attempts if a.attempt == by_id[a.rollout].counted_attempt]


async def attempt_reports(store: Store, attempts: Sequence[tuple[Rollout, Attempt]]) -> list[AttemptReport]:
    """Everything that is recorded of these attempts."""
    keys = [attempt.key for _, attempt in attempts]
    calls, tool_results = by_rollout(await store.calls(keys)), by_rollout(await store.tool_results(keys))
    rewards, records = by_rollout(await store.rewards(keys)), by_rollout(await store.training_records(keys))

    def report(rollout: Rollout, attempt: Attempt) -> AttemptReport:
        own_calls = _of(attempt, calls)
        episode = build_episode(rollout, attempt, own_calls, _of(attempt, tool_results), _of(attempt, rewards))
        return AttemptReport(attempt, episode, _of(attempt, records), any(call.pruned for call in own_calls))

    return [report(rollout, attempt) for rollout, attempt in attempts]


def _of(attempt: Attempt, records: Mapping[str, Sequence[Recorded]]) -> list[Recorded]:
    """The records of one attempt, among those of its rollout."""
    return [record for record in records.get(attempt.rollout, ()) if record.attempt == attempt.attempt]


async def healths_of(store: Store, rollouts: Sequence[Rollout]) -> dict[str, RolloutHealth]:
    """The health of those of these rollouts that are done, by id."""
    done = [r for r in rollouts if r.state is RolloutState.DONE]
    reports = await attempt_reports(store, await counted_of(store, done))
    healths = {report.attempt.rollout: report.health for report in reports}
    return {r.id: healths.get(r.id, RolloutHealth(symptoms=(Symptom.ENDING,))) for r in done}


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


def reward_weights(run: Run) -> dict[str, float]:
    """The weights of a run's reward rules in the terminal reward, by name."""
    return {name: float(section["weight"]) for name, section in run.config.get("rewards", {}).items()}
