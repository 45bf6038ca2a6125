"""Rollouts of one task side by side, turn by turn: those of a group, or one of each of two evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agl_core.analysis.rollouts import AttemptReport, RolloutEntry, Turn, attempt_reports, counted_of, entries_of
from agl_core.analysis.text.words import message_text
from agl_core.store.interface import Store


@dataclass(frozen=True, slots=True)
class Cell:
    """One side's turn."""

    turn: Turn
    shared: str
    """The beginning of its response that all sides with the same history have."""
    own: str
    """The rest, where they part."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn of all sides; None where a side has none."""

    cells: Sequence[Cell | None]
    parts: bool
    """Whether sides with the same history went different ways here."""


@dataclass(frozen=True, slots=True)
class Side:
    """A rollout, with the attempt that counts."""

    entry: RolloutEntry
    attempt: AttemptReport | None


async def read_side(store: Store, rollout: str) -> Side:
    """The rollout whose id starts with `rollout`. StoreError if there is no such rollout, or several."""
    entries = await entries_of(store, [await store.rollout(rollout)])
    return (await sides_of(store, entries))[0]


async def sides_of(store: Store, entries: Sequence[RolloutEntry]) -> list[Side]:
    """In the order of the entries."""
    counted = await counted_of(store, [entry.rollout for entry in entries])
    reports = {report.attempt.rollout: report for report in await attempt_reports(store, counted)}
    return [Side(entry, reports.get(entry.rollout.id)) for entry in entries]


def align(sides: Sequence[Side]) -> list[Row]:
    """The turns of all sides, each against those that had said the same until then."""
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
        for of_side, said in zip(turns, texts, strict=True):
            if number < len(said):
                length = shared[tuple(said[:number])]
                cells.append(Cell(of_side[number], said[number][:length], said[number][length:]))
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
