"""Groups of rollouts, for the pages: those of a step that match a query, and the rollouts of one task side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agl_core.reading.explained import (
    AttemptReport,
    GroupCredit,
    Turn,
    attempt_reports,
    counted_of,
    group_credit,
    read_members,
)
from agl_core.reading.rollouts import Query, RolloutEntry, entries_of, matching
from agl_core.reading.words import message_text
from agl_core.store.interface import Store
from agl_core.training.rollouts import by_rollout, counted_attempts
from agl_core.types import Json, Mode, RolloutState, Task, TrainingRecord, are_equal


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group."""

    entry: RolloutEntry
    answer: Json
    """What the agent returned."""
    advantage: float | None
    """The mean over its trained transitions, of the last step that used it; None if none was trained on."""
    matches: bool
    """True if the query asks for it."""


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

    @classmethod
    def of(cls, members: Sequence[Member]) -> Group:
        first = members[0].entry.rollout
        rewards = [m.entry.reward for m in members if m.entry.reward is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        std = None
        if mean is not None and len(rewards) > 1:
            squares = math.fsum((reward - mean) ** 2 for reward in rewards)
            std = 0.0 if are_equal(rewards) else math.sqrt(squares / (len(rewards) - 1))
        return cls(first.group, first.task, first.mode, first.step, members, mean, std)

    @property
    def is_equal(self) -> bool:
        """True if it has no contrast: several rewards, and all of them are equal."""
        return self.std == 0


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Groups in which something matches: those that train first, of several steps the newest first."""

    groups: Sequence[Group]
    matching: int
    """The number of matching rollouts among all that were looked at."""
    total: int
    """The number of rollouts that were looked at."""
    older: str | None
    """The rollout that older pages are before; None if there are none."""
    newer: str | None
    """The rollout that newer pages are after; None if there are none."""


async def find_groups(
    store: Store, query: Query, size: int, before: str | None = None, after: str | None = None
) -> GroupPage:
    """The groups with rollouts that match, among `size` rollouts of the step and mode.

    These are the newest, or those before or after another rollout. A group is on one page.
    """
    most = size + 1
    rollouts = await store.rollouts(
        step=query.step, mode=query.mode, before=before, after=after, limit=most, newest=None if after else most
    )
    goes_on = len(rollouts) > size
    if goes_on:
        cut = rollouts[0 if after is None else -1].group
        rollouts = [rollout for rollout in rollouts if rollout.group != cut] or rollouts
    entries = await entries_of(store, rollouts)
    records = by_rollout(await store.training_records(counted_attempts(rollouts)))
    answers = {rollout.id: attempt.result for rollout, attempt in await counted_of(store, rollouts)}
    ids = await matching(store, query, entries)
    by_group: dict[tuple[str, str, int], list[Member]] = {}
    for entry in entries:
        rollout = entry.rollout
        advantage = _advantage(records.get(rollout.id, ()))
        member = Member(entry, answers.get(rollout.id), advantage, rollout.id in ids)
        by_group.setdefault((rollout.group, rollout.run, rollout.restart), []).append(member)
    groups = [Group.of(members) for members in by_group.values() if any(member.matches for member in members)]
    return GroupPage(
        sorted(groups, key=lambda group: (not group.mode.trains, -group.step)),
        matching=len(ids),
        total=len(rollouts),
        older=rollouts[0].id if rollouts and (goes_on or after is not None) else None,
        newer=rollouts[-1].id if rollouts and (before is not None or (goes_on and after is not None)) else None,
    )


async def step_rewards(store: Store, step: int) -> list[float]:
    """The terminal rewards of a training step, without those that a restart superseded."""
    done = await store.rollouts(step=step, mode=Mode.TRAIN, state=RolloutState.DONE)
    entries = await entries_of(store, [rollout for rollout in done if rollout.counted_attempt is not None])
    return [entry.reward for entry in entries if entry.reward is not None and not entry.superseded]


def _advantage(records: Sequence[TrainingRecord]) -> float | None:
    used = [record for record in records if record.advantage is not None and record.dropped is None]
    last = max((record.step for record in used), default=0)
    values = [record.advantage for record in used if record.step == last and record.advantage is not None]
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Cell:
    """One side's turn."""

    turn: Turn
    shared: str
    """The beginning of its response that all sides with the same history have."""
    own: str
    """The rest, where they part."""


@dataclass(frozen=True, slots=True)
class AlignedTurn:
    """One turn of all sides; None where a side has none."""

    cells: Sequence[Cell | None]
    parts: bool
    """True if sides with the same history went different ways here."""


@dataclass(frozen=True, slots=True)
class Side:
    """A rollout, with the attempt that counts."""

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
    rows: Sequence[AlignedTurn]
    credit: Sequence[GroupCredit]


async def read_group(store: Store, prefix: str) -> GroupReport:
    """The group of the rollout whose id starts with `prefix`. StoreError if there is no such rollout, or several."""
    one = await store.rollout(prefix)
    entries = await entries_of(store, await read_members(store, one))
    entries.sort(key=lambda e: (-math.inf if e.reward is None else e.reward, -e.rollout.member), reverse=True)
    sides = await sides_of(store, entries)
    return GroupReport(one.group, one.task, one.mode, one.step, sides, align(sides), await group_credit(store, one))


async def read_side(store: Store, prefix: str) -> Side:
    """The rollout whose id starts with `prefix`. StoreError if there is no such rollout, or several."""
    return (await sides_of(store, await entries_of(store, [await store.rollout(prefix)])))[0]


async def sides_of(store: Store, entries: Sequence[RolloutEntry]) -> list[Side]:
    """In the order of the entries."""
    counted = await counted_of(store, [entry.rollout for entry in entries])
    reports = {report.attempt.rollout: report for report in await attempt_reports(store, counted)}
    return [Side(entry, reports.get(entry.rollout.id)) for entry in entries]


def align(sides: Sequence[Side]) -> list[AlignedTurn]:
    """The turns of all sides, each against those that had said the same until then."""
    turns = [[] if side.attempt is None else side.attempt.turns for side in sides]
    texts = [[message_text(turn.transition.response) for turn in of_side] for of_side in turns]
    rows = []
    for number in range(max(map(len, turns), default=0)):
        by_history: dict[tuple[str, ...], list[str]] = {}
        for replies in texts:
            if number < len(replies):
                by_history.setdefault(tuple(replies[:number]), []).append(replies[number])
        shared = {history: _common_length(replies) for history, replies in by_history.items()}
        cells: list[Cell | None] = []
        for of_side, replies in zip(turns, texts, strict=True):
            if number < len(replies):
                length = shared[tuple(replies[:number])]
                cells.append(Cell(of_side[number], replies[number][:length], replies[number][length:]))
            else:
                cells.append(None)
        rows.append(AlignedTurn(cells, any(len(set(replies)) > 1 for replies in by_history.values())))
    return rows


def _common_length(texts: Sequence[str]) -> int:
    """The length of the common beginning, without a word that is cut off."""
    first, last = min(texts), max(texts)
    length = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    while length and first != last and f"{first} "[length - 1].isalnum() and f"{last} "[length].isalnum():
        length -= 1
    return length
