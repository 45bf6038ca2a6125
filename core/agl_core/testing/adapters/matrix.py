"""The matrix: scenario × driver × API × streaming × form, and which cells are gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agl_core.testing.adapters.catalogue import SCENARIOS
from agl_core.testing.adapters.driver import Driver
from agl_core.testing.adapters.scenario import Scenario


@dataclass(frozen=True)
class Cell:
    """One scenario as one driver plays it."""

    scenario: Scenario
    driver: Driver
    api: str
    streaming: bool
    form: str

    def __str__(self) -> str:
        streaming = "streaming" if self.streaming else "not streaming"
        return f"{self.driver.name} | {self.api} | {streaming} | {self.form} | {self.scenario}"

    @property
    def gap(self) -> str | None:
        """Why it cannot pass; None if it has to."""
        reasons = [
            gap.reason
            for gap in self.driver.gaps
            if gap.covers(self.scenario.name, self.api, self.streaming, self.form)
        ]
        return reasons[0] if reasons else None


def cells(drivers: Sequence[Driver]) -> Iterator[Cell]:
    """All cells; ValueError if a gap covers none.

    The first form is played throughout, the others with one of both streaming modes for each API, in turn.
    """
    for driver in drivers:
        found = [
            Cell(scenario, driver, api, streaming, form)
            for scenario in SCENARIOS
            for place, api in enumerate(driver.apis)
            for streaming in driver.streaming
            for form in driver.forms
            if form == driver.forms[0] or streaming is driver.streaming[~place % len(driver.streaming)]
        ]
        for gap in driver.gaps:
            if not any(gap.covers(each.scenario.name, each.api, each.streaming, each.form) for each in found):
                raise ValueError(f"{driver.name}: the gap {gap} covers no cell. Check the names in it.")
        yield from found


def pairwise(cells: Sequence[Cell]) -> set[str]:
    """The names of few cells in which every pair is played that is played in any: scenario and API, driver and form, …

    A gap plays nothing, and is not chosen.
    """
    pairs = {str(cell): _pairs(cell) for cell in cells if cell.gap is None}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(pairs, key=lambda name: len(pairs[name] & left))
        chosen.add(best)
        left -= pairs.pop(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[str, object], ...]]:
    values = {
        "scenario": str(cell.scenario),
        "driver": cell.driver.name,
        "api": cell.api,
        "streaming": cell.streaming,
        "form": cell.form,
    }
    return set(itertools.combinations(values.items(), 2))
