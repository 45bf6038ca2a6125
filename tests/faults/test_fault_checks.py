"""The checks themselves: of a run that went well they say nothing, and each planted fault they notice."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .fault_checks import check_ended
from .fault_parts import LEDGER
from .fault_run import TinyRun

STEPS = 2
SETTINGS = {"train.steps": STEPS}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path_factory.mktemp("ended") / "run", workers=1, **SETTINGS)
    try:
        run.start()
        run.finish()
        yield run
    finally:
        run.stop()


def sql(statement: str) -> Callable[[TinyRun], None]:
    def plant(run: TinyRun) -> None:
        with closing(sqlite3.connect(run.store)) as store, store:
            assert store.execute(statement).rowcount > 0

    return plant


def forgotten_update(run: TinyRun) -> None:
    change_ledger(run, lambda updates: updates[-1].pop())


def repeated_update(run: TinyRun) -> None:
    change_ledger(run, lambda updates: updates.append(updates[0]))


def change_ledger(run: TinyRun, change: Callable[[list[list[object]]], object]) -> None:
    file = run.folder / "checkpoints" / f"step-{STEPS:06d}" / LEDGER
    ledger = json.loads(file.read_text())
    change(ledger["updates"])
    file.write_text(json.dumps(ledger))


def repeated_attempt(run: TinyRun) -> None:
    first = run.notes.read_bytes().split(b"\n")[0]
    with run.notes.open("ab") as notes:
        notes.write(first + b"\n")


def repeated_step(run: TinyRun) -> None:
    metrics = run.folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text() * 2)


FIRST = "seq = (SELECT min(seq) FROM {0})"
CHOICE = FIRST.format("choices")
ANOTHER = "CAST(x'01000000' || substr({0}, 5) AS BLOB)"
FAULTS = {
    "a call is gone": sql(f"DELETE FROM calls WHERE {FIRST.format('calls')}"),
    "a token is another": sql(f"UPDATE choices SET response_ids = {ANOTHER.format('response_ids')} WHERE {CHOICE}"),
    "a probability is another": sql(f"UPDATE choices SET logprobs = {ANOTHER.format('logprobs')} WHERE {CHOICE}"),
    "a call does not count": sql(f"UPDATE calls SET late = 1 WHERE {FIRST.format('calls')}"),
    "a call was sampled by older weights": sql("UPDATE calls SET version = 0 WHERE version = 1"),
    "a sample was not used": sql(f"DELETE FROM training_records WHERE {FIRST.format('training_records')}"),
    "a sample was used twice": sql(
        "INSERT INTO training_records (attempt_key, call, choice, step, credit, advantage, weight, dropped) "
        "SELECT attempt_key, call, choice, 7, credit, advantage, weight, dropped FROM training_records "
        f"WHERE {FIRST.format('training_records')}"
    ),
    "a rollout is open": sql(f"UPDATE rollouts SET state = 'running' WHERE {FIRST.format('rollouts')}"),
    "a rollout was lost": sql(f"UPDATE rollouts SET ending = 'lost' WHERE {FIRST.format('rollouts')}"),
    "a rollout is gone": sql(f"DELETE FROM rollouts WHERE {FIRST.format('rollouts')}"),
    "an update was forgotten": forgotten_update,
    "an update was made twice": repeated_update,
    "an attempt was run twice": repeated_attempt,
    "a step is told twice": repeated_step,
}


@pytest.mark.storm
def test_a_run_that_went_well_passes(ended: TinyRun) -> None:
    check_ended(ended, STEPS)


@pytest.mark.storm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(ended: TinyRun, tmp_path: Path, fault: str) -> None:
    shutil.copytree(ended.place, tmp_path / "copy")
    copy = TinyRun(tmp_path / "copy", **SETTINGS)
    FAULTS[fault](copy)
    with pytest.raises(AssertionError):
        check_ended(copy, STEPS)
