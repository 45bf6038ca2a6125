"""Groups of rollouts, for the pages: in lists, and side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agl_core.types import Rollout, TrainingRecord, are_equal
from agl_server.health.rollouts import show_message
from agl_server.reading.explained import RolloutEntry, RolloutReport, Turn
from agl_server.reading.rollouts import RolloutPage, groups_of


@dataclass(frozen=True, slots=True)
class Member:
    entry: RolloutEntry
    advantage: float | None
    """The mean over its transitions that the last step trained on; None without any."""
    matches: bool
    """True if the query asks for it."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task that are compared."""

    members: Sequence[Member]

    @property
    def first(self) -> Rollout:
        return self.members[0].entry.rollout

    @property
    def rewards(self) -> list[float]:
        """The terminal rewards of the members that have one."""
        return [member.entry.reward for member in self.members if member.entry.reward is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def std(self) -> float | None:
        """The unbiased deviation of the rewards: 0 without contrast, None for fewer than two."""
        rewards = self.rewards
        if are_equal(rewards):
            return 0.0 if len(rewards) > 1 else None
        return math.dist(rewards, [fmean(rewards)] * len(rewards)) / math.sqrt(len(rewards) - 1)


def groups_on(page: RolloutPage) -> list[Group]:
    """Groups in which something matches: training before evaluation, the newest step first."""
    by_id = {entry.rollout.id: entry for entry in page.entries}
    groups = [
        Group([Member(by_id[r.id], _advantage(by_id[r.id].training_records), r.id in page.matching) for r in group])
        for group in groups_of([entry.rollout for entry in page.entries])
        if any(r.id in page.matching for r in group)
    ]
    return sorted(groups, key=lambda group: (not group.first.mode.trains, -group.first.step))


def _advantage(records: Sequence[TrainingRecord]) -> float | None:
    values = [record.advantage for record in records if record.advantage is not None and record.dropped is None]
    return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Cell:
    """One side's turn."""

    turn: Turn
    shared: str
    """The beginning of its response that all sides with the same history have."""
    own: str
    """The rest."""


def align(sides: Sequence[RolloutReport]) -> list[tuple[list[Cell | None], bool]]:
    """By turn: a cell for each side, None without such a turn; and True if sides with one history parted in it."""
    shown = [[] if side.counted is None else side.counted.turns for side in sides]
    turns = [[turn for turn in of_side if turn.transition.housekeeping is None] for of_side in shown]
    texts = [[show_message(turn.transition.response) for turn in of_side] for of_side in turns]
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
        rows.append((cells, any(cell.own for cell in cells if cell is not None)))
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
