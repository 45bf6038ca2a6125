"""Which cells are played, and playing them: each gives a score and what was wrong."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_core.testing.adapters.catalogue import FIFTEEN_CALLS, cells
from agl_core.testing.adapters.driver import CHAT, Agent, Cell, Driver, Scenario, Turn
from agl_core.testing.adapters.playing import Bench, running_bench
from agl_core.testing.scripts import Say

from .conditions import AS_IT_IS, CONDITIONS, Condition
from .recorders import Recorder
from .scores import Score, sampled, score

_HELLO = Say("Hello.")
SINGLE_CALL = Scenario(
    "single call",
    "one agent makes one call",
    (Agent("speaker", (_HELLO,)),),
    (Turn("speaker", 0, _HELLO),),
)
LONG_HISTORY = dataclasses.replace(
    FIFTEEN_CALLS,
    name="long history",
    about="the same with a question of 6,000 characters, which every call sends again",
    question="What do you find in all of this? " + "Much is written here. " * 270,
)
OWN = (SINGLE_CALL, LONG_HISTORY)
"""Scenarios of this benchmark; the others are those of the conformance suite."""


@dataclass(frozen=True)
class Task:
    """A cell, and under which condition it is played."""

    cell: Cell
    condition: Condition


@dataclass(frozen=True)
class Played:
    """What came of it."""

    task: Task
    score: Score
    faults: list[str]


def tasks_of_agl(driver: Driver, form: str) -> Iterator[Task]:
    """Every cell in this form; in the driver's first form, some scenarios under all conditions too."""
    for cell in _every(driver):
        if cell.form == form:
            yield Task(cell, AS_IT_IS)
    if form == driver.forms[0]:
        yield from _under_conditions(driver, CONDITIONS[1:])


def tasks_of_others(driver: Driver) -> Iterator[Task]:
    """What is compared between recorders: see `is_compared`."""
    for cell in _every(driver):
        if _is_plain(cell):
            yield Task(cell, AS_IT_IS)
    yield from _under_conditions(driver, [each for each in CONDITIONS[1:] if not each.blind])


def is_compared(task: Task) -> bool:
    """Whether other recorders play it too: chat completions in the driver's first form, with nothing withheld."""
    return _is_plain(task.cell) and not task.condition.blind


def _is_plain(cell: Cell) -> bool:
    return cell.api == CHAT and cell.form == cell.driver.forms[0]


def _under_conditions(driver: Driver, conditions: Sequence[Condition]) -> Iterator[Task]:
    for condition in conditions:
        for scenario in condition.scenarios:
            for streaming in driver.streaming:
                yield Task(Cell(scenario, driver, CHAT, streaming, condition.form or driver.forms[0]), condition)


def _every(driver: Driver) -> Iterator[Cell]:
    found = list(cells([driver]))
    yield from found
    for scenario in OWN:
        for api, streaming, form in dict.fromkeys((cell.api, cell.streaming, cell.form) for cell in found):
            yield Cell(scenario, driver, api, streaming, form)


async def play_all(recorder: Recorder, tasks: Iterable[Task]) -> AsyncIterator[Played]:
    """Play the tasks one after the other, except declared gaps."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_bench(Path(folder)) as shared:
            for number, task in enumerate(tasks):
                if task.cell.gap is not None:
                    continue
                if task.condition is AS_IT_IS:
                    yield await play(recorder, shared, task)
                    continue
                place = Path(folder) / str(number)
                place.mkdir()
                async with task.condition.bench(place) as bench:
                    yield await play(recorder, bench, task)


async def play(recorder: Recorder, bench: Bench, task: Task) -> Played:
    """Play one, and compare what was recorded with the log of the model server."""
    script = task.condition.play(task.cell.scenario)
    log = bench.stack.upstream.log = []
    recorded, failed = await recorder.record(bench, task.cell, task.condition, script)
    truth = sampled(task.cell.scenario, script, log)
    counted, faults = score(truth, recorded)
    counted.failed = bool(script.faults or failed)
    return Played(task, counted, [*script.faults, *failed, *faults])
