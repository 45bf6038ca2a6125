"""Groups of rollouts: those of a step that match a query, their rewards, and one group side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agl_core.analysis.rollouts import (
    AttemptReport,
    GroupCredit,
    RolloutEntry,
    Turn,
    attempt_reports,
    entries_of,
    group_credit,
)
from agl_core.analysis.words import message_text
from agl_core.store.interface import Store
from agl_core.training.collect import by_rollout, counted_attempts
from agl_core.types import Call, Ending, Mode, Rollout, RolloutState, Task, TrainingRecord


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollouts; None: any."""

    step: int | None = None
    mode: Mode | None = None
    ending: Ending | None = None
    agent: str | None = None
    """One that made a call."""
    low: float | None = None
    """The least terminal reward."""
    high: float | None = None
    """The highest terminal reward; it is included."""
    text: str | None = None
    """Somewhere in the task's input, a message, a reply, or the result; upper and lower case are alike."""


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
    """The number of rollouts of this step and mode."""
    looked_at: int
    """The number of rollouts that were looked at: the newest ones."""
    agents: Sequence[str]
    """The agents that made calls in them."""


@dataclass(frozen=True, slots=True)
class StepRewards:
    """The terminal rewards of a training step."""

    rewards: Sequence[float]
    groups: int
    """The number of groups with at least two rewards."""
    equal_groups: int
    """The number of those whose rewards are all equal: nothing can be learnt by comparing them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One member's turn."""

    turn: Turn
    shared: str
    """The beginning of its response that all members with the same history have."""
    own: str
    """The rest, where they part."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn of all members; None where a member has none."""

    cells: Sequence[Cell | None]
    parts: bool
    """Whether members with the same history went different ways here."""


@dataclass(frozen=True, slots=True)
class Side:
    """One member of a group, with the attempt that counts."""

    entry: RolloutEntry
    attempt: AttemptReport | None


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
    every = await store.rollouts(step=query.step, mode=query.mode)
    newest = every[-limit:]
    keys = counted_attempts(newest)
    calls = by_rollout(await store.calls(keys))
    records = by_rollout(await store.training_records(keys))
    members = [
        Member(entry, _advantage(records.get(entry.rollout.id, ())), _matches(query, entry, calls))
        for entry in await entries_of(store, newest)
    ]
    if query.text:
        members = [await _by_its_result(store, query, member, calls) for member in members]
    by_group: dict[tuple[str, str, int], list[Member]] = {}
    for member in members:
        rollout = member.entry.rollout
        by_group.setdefault((rollout.group, rollout.run, rollout.restart), []).append(member)
    groups = [_group(of_group) for of_group in by_group.values() if any(m.matches for m in of_group)]
    agents = sorted({call.agent for of_rollout in calls.values() for call in of_rollout if call.agent})
    return GroupList(groups, sum(m.matches for m in members), len(every), len(newest), agents)


async def rewards_by_step(store: Store) -> dict[int, StepRewards]:
    """The terminal rewards of each training step, without those that a restart superseded."""
    done = [r for r in await store.rollouts(mode=Mode.TRAIN, state=RolloutState.DONE) if r.counted_attempt is not None]
    by_step: dict[int, dict[str, list[float]]] = {}
    for entry in await entries_of(store, done):
        if entry.reward is not None and not entry.superseded:
            of_group = by_step.setdefault(entry.rollout.step, {}).setdefault(entry.rollout.group, [])
            of_group.append(entry.reward)
    return {step: _step_rewards(groups) for step, groups in sorted(by_step.items())}


async def read_group(store: Store, prefix: str) -> GroupReport:
    """The group of the rollout whose id starts with `prefix`. StoreError if there is no such rollout, or several."""
    one = await store.rollout(prefix)
    found = await store.rollouts(run=one.run, group=one.group, mode=one.mode)
    entries = await entries_of(store, [r for r in found if r.restart == one.restart])
    entries.sort(key=lambda e: (-math.inf if e.reward is None else e.reward, -e.rollout.member), reverse=True)
    counted = [
        (entry.rollout, attempt)
        for entry in entries
        for attempt in await store.attempts(entry.rollout.id)
        if attempt.attempt == entry.rollout.counted_attempt
    ]
    reports = {report.attempt.rollout: report for report in await attempt_reports(store, counted)}
    sides = [Side(entry, reports.get(entry.rollout.id)) for entry in entries]
    credit = await group_credit(store, one)
    return GroupReport(one.group, one.task, one.mode, one.step, sides, _aligned(sides), credit)


async def _by_its_result(store: Store, query: Query, member: Member, calls: Mapping[str, Sequence[Call]]) -> Member:
    """The member, which matches if the text is in its result, and all else matches."""
    if member.matches or not query.text or not _matches(query, member.entry, calls, but_text=True):
        return member
    results = [str(attempt.result) for attempt in await store.attempts(member.entry.rollout.id)]
    return replace(member, matches=any(query.text.lower() in result.lower() for result in results))


def _group(members: Sequence[Member]) -> Group:
    first = members[0].entry.rollout
    rewards = [m.entry.reward for m in members if m.entry.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    std = None
    if mean is not None and len(rewards) > 1:
        std = (
            0.0 if _are_equal(rewards) else math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        )
    return Group(first.group, first.task, first.mode, first.step, members, mean, std)


def _step_rewards(groups: Mapping[str, Sequence[float]]) -> StepRewards:
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    every = [reward for rewards in groups.values() for reward in rewards]
    return StepRewards(every, len(several), sum(_are_equal(rewards) for rewards in several))


def _are_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) == min(rewards)


def _advantage(records: Sequence[TrainingRecord]) -> float | None:
    used = [record for record in records if record.advantage is not None and record.dropped is None]
    last = max((record.step for record in used), default=0)
    values = [record.advantage for record in used if record.step == last and record.advantage is not None]
    return math.fsum(values) / len(values) if values else None


def _matches(query: Query, entry: RolloutEntry, calls: Mapping[str, Sequence[Call]], *, but_text: bool = False) -> bool:
    rollout, reward, mine = entry.rollout, entry.reward, calls.get(entry.rollout.id, ())
    if query.ending is not None and rollout.ending is not query.ending:
        return False
    if query.low is not None and (reward is None or reward < query.low):
        return False
    if query.high is not None and (reward is None or reward > query.high):
        return False
    if query.agent is not None and query.agent not in {call.agent for call in mine}:
        return False
    return but_text or not query.text or query.text.lower() in _text_of(rollout, mine).lower()


def _text_of(rollout: Rollout, calls: Sequence[Call]) -> str:
    messages = [
        message for call in calls for message in call.request.get("messages") or () if isinstance(message, dict)
    ]
    said = [*messages, *(choice.message for call in calls for choice in call.choices)]
    return "\n".join([str(rollout.task.input), *map(message_text, said)])


def _aligned(sides: Sequence[Side]) -> list[Row]:
    """The turns of all members, each against those that had said the same until then."""
    turns = [[] if side.attempt is None else side.attempt.turns for side in sides]
    texts = [[message_text(turn.transition.response) for turn in each] for each in turns]
    rows = []
    for number in range(max(map(len, turns), default=0)):
        alike: dict[tuple[str, ...], list[str]] = {}
        for said in texts:
            if number < len(said):
                alike.setdefault(tuple(said[:number]), []).append(said[number])
        shared = {history: _common(said) for history, said in alike.items()}
        cells: list[Cell | None] = []
        for of_member, said in zip(turns, texts, strict=True):
            if number < len(said):
                length = shared[tuple(said[:number])]
                cells.append(Cell(of_member[number], said[number][:length], said[number][length:]))
            else:
                cells.append(None)
        rows.append(Row(cells, any(len(set(said)) > 1 for said in alike.values())))
    return rows


def _common(texts: Sequence[str]) -> int:
    """The length of the common beginning, without a word that is cut off."""
    first, last = min(texts), max(texts)
    length = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    while length and first != last and f"{first} "[length - 1].isalnum() and f"{last} "[length].isalnum():
        length -= 1
    return length
