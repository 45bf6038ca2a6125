"""Results as files: one for each framework, summed over APIs, streaming and forms, without dates and times."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agl_core.testing.adapters.driver import Driver

from .playing import Played, is_compared
from .scores import Score

FOLDER = Path(__file__).with_name("results")


@dataclass
class Row:
    """One recorder, condition and scenario of a framework."""

    recorder: str
    condition: str
    scenario: str
    compared: bool
    """Whether every recorder played these cells."""
    score: Score
    faults: list[str]
    """`cell: what was wrong`"""


@dataclass(frozen=True)
class Result:
    """A framework's results."""

    framework: str
    versions: Mapping[str, str]
    rows: Sequence[Row]

    def score(self, recorder: str, *, compared: bool = False, conditions: Iterable[str] | None = None) -> Score:
        """The sum of a recorder's rows; of those that every recorder played, or of some conditions."""
        chosen = [
            row.score
            for row in self.rows
            if row.recorder == recorder
            and (row.compared or not compared)
            and (conditions is None or row.condition in conditions)
        ]
        return sum(chosen, Score())


def result_of(driver: Driver, recorder: str, played: Iterable[Played]) -> Result:
    """Sum up what a recorder saw."""
    rows = []
    for one in played:
        cell = one.task.cell
        where = f"{cell.api}, {'streaming' if cell.streaming else 'not streaming'}, {cell.form}"
        faults = [f"{where}: {fault}" + (f" ({n} times)" if n > 1 else "") for fault, n in Counter(one.faults).items()]
        key = (recorder, one.task.condition.name, cell.scenario.name, is_compared(one.task))
        rows.append(Row(*key, one.score, faults))
    return Result(driver.name, {name: version(name) for name in driver.packages}, _summed(rows))


def merged(results: Sequence[Result]) -> Result:
    """The parts of one framework's results, as one."""
    return dataclasses.replace(results[0], rows=_summed(row for result in results for row in result.rows))


def _summed(rows: Iterable[Row]) -> list[Row]:
    """One row for each recorder, condition and scenario."""
    sums: dict[tuple[str, str, str, bool], Row] = {}
    for row in rows:
        key = (row.recorder, row.condition, row.scenario, row.compared)
        one = sums.setdefault(key, Row(*key, Score(), []))
        one.score += row.score
        one.faults += row.faults
    return list(sums.values())


def path_of(driver: Driver) -> Path:
    """A framework's file."""
    return FOLDER / f"{type(driver).__name__.lower()}.json"


def write(result: Result, path: Path) -> None:
    """Write a framework's file; one row is one line."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in result.rows)
    head = f'"framework": {json.dumps(result.framework)},\n"versions": {json.dumps(result.versions)}'
    path.write_text(f'{{\n{head},\n"rows": [\n{rows}\n]\n}}\n')


def read(path: Path) -> Result:
    """A framework's file."""
    saved: dict[str, Any] = json.loads(path.read_text())
    rows = [Row(**{**row, "score": Score(**row["score"])}) for row in saved["rows"]]
    return Result(saved["framework"], saved["versions"], rows)


def read_all(folder: Path = FOLDER) -> list[Result]:
    """Every framework's file, by their names."""
    return [read(path) for path in sorted(folder.glob("*.json"))]
