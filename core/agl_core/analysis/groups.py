"""Groups of rollouts: those of a step that match a query, their rewards, and one group side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agl_core.analysis.comparisons.side_by_side import Row, Side, align, sides_of
from agl_core.analysis.filters import Query, matching
from agl_core.analysis.rollouts import GroupCredit, RolloutEntry, entries_of, group_credit
from agl_core.returns import are_equal
from agl_core.store.interface import Store
from agl_core.training.rollouts import by_rollout, counted_attempts
from agl_core.types import Mode, RolloutState, Task, TrainingRecord

_LOOKED_INTO = 40
"""So many rollouts are looked into to know which agents, policies and tools there are."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group."""

    entry: RolloutEntry
    advantage: float | None
    """The mean over its trained transitions, of the last step that used it; None if none was trained on."""
    matches: bool
    """Whether the query asks for it."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that are compared."""

    name: str
    task: Task
    mode: Mode
    step: int
    members: Sequence[Member]
    mean: float | None
    """The mean terminal reward; None if no member has one."""
    std: float | None
    """Its unbiased deviation; None for fewer than two."""

    @property
    def is_equal(self) -> bool:
        """Whether it has no contrast: several rewards, and all of them are equal."""
        return self.std == 0


@dataclass(frozen=True, slots=True)
class GroupList:
    """Groups in which something matches, in the order in which they were made."""

    groups: Sequence[Group]
    matching: int
    """The number of matching rollouts among all that were looked at."""
    total: int
    """The number of rollouts that were looked at: the newest ones."""
    is_all: bool
    """Whether these are all of this step and mode."""
    agents: Sequence[str]
    """Agents that made calls in them; like policies and tools, those of some of the rollouts."""
    policies: Sequence[str]
    tools: Sequence[str]
    drops: Sequence[str]
    """Reasons for which their transitions were dropped."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group side by side, the best first."""

    name: str
    task: Task
    mode: Mode
    step: int
    sides: Sequence[Side]
    rows: Sequence[Row]
    credit: Sequence[GroupCredit]


async def find_groups(store: Store, query: Query, limit: int) -> GroupList:
    """The groups with rollouts that match, among the newest `limit` rollouts of the step and mode."""
    newest = await store.rollouts(step=query.step, mode=query.mode, newest=limit + 1)
    is_all, newest = len(newest) <= limit, newest[-limit:]
    keys = counted_attempts(newest)
    entries = await entries_of(store, newest)
    records = by_rollout(await store.training_records(keys))
    ids = await matching(store, query, entries, records)
    by_group: dict[tuple[str, str, int], list[Member]] = {}
    for entry in entries:
        rollout = entry.rollout
        member = Member(entry, _advantage(records.get(rollout.id, ())), rollout.id in ids)
        by_group.setdefault((rollout.group, rollout.run, rollout.restart), []).append(member)
    groups = [_group(of_group) for of_group in by_group.values() if any(m.matches for m in of_group)]
    some = keys[:: max(1, len(keys) // _LOOKED_INTO)]
    calls, tools = await store.calls(some), await store.tool_results(some)
    return GroupList(
        groups,
        matching=len(ids),
        total=len(newest),
        is_all=is_all,
        agents=sorted({call.agent for call in calls if call.agent} | ({query.agent} if query.agent else set())),
        policies=sorted({call.policy for call in calls} | ({query.policy} if query.policy else set())),
        tools=sorted({result.tool for result in tools} | ({query.tool} if query.tool else set())),
        drops=sorted({str(r.dropped) for of_one in records.values() for r in of_one if r.dropped}),
    )


async def step_rewards(store: Store, step: int) -> list[float]:
    """The terminal rewards of a training step, without those that a restart superseded."""
    found = await store.rollouts(step=step, mode=Mode.TRAIN, state=RolloutState.DONE)
    entries = await entries_of(store, [rollout for rollout in found if rollout.counted_attempt is not None])
    return [entry.reward for entry in entries if entry.reward is not None and not entry.superseded]


async def read_group(store: Store, prefix: str) -> GroupReport:
    """The group of the rollout whose id starts with `prefix`. StoreError if there is no such rollout, or several."""
    one = await store.rollout(prefix)
    found = await store.rollouts(run=one.run, group=one.group, mode=one.mode)
    entries = await entries_of(store, [r for r in found if r.restart == one.restart])
    entries.sort(key=lambda e: (-math.inf if e.reward is None else e.reward, -e.rollout.member), reverse=True)
    sides = await sides_of(store, entries)
    credit = await group_credit(store, one)
    return GroupReport(one.group, one.task, one.mode, one.step, sides, align(sides), credit)


def _group(members: Sequence[Member]) -> Group:
    first = members[0].entry.rollout
    rewards = [m.entry.reward for m in members if m.entry.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    std = None
    if mean is not None and len(rewards) > 1:
        std = 0.0 if are_equal(rewards) else math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return Group(first.group, first.task, first.mode, first.step, members, mean, std)


def _advantage(records: Sequence[TrainingRecord]) -> float | None:
    used = [record for record in records if record.advantage is not None and record.dropped is None]
    last = max((record.step for record in used), default=0)
    values = [record.advantage for record in used if record.step == last and record.advantage is not None]
    return math.fsum(values) / len(values) if values else None
