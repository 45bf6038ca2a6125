"""A write-ahead log that was damaged while nobody used the store: the next run goes on from what is whole."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest

from .fault_run import TinyRun
from .fault_storm import wait_for_replies


@pytest.mark.storm
def test_a_damaged_log_is_read_up_to_the_damage(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    """That is what SQLite does with a log that was cut off: what came later was never there, and training goes on."""
    run = tiny_run(workers=1)
    run.start()
    wait_for_replies(run, 15)
    run.trainer.kill()
    log = run.store.with_name(run.store.name + "-wal")
    whole = log.read_bytes()
    place = chance.randrange(len(whole) // 2, len(whole))
    log.write_bytes(whole[:place] + chance.choice([b"", chance.randbytes(len(whole) - place)]))
    run.begin(run.trainer.name)
    wait_for_replies(run, 5)
    steps = run.finish_after(1)
    assert run.summary()["steps"] == steps
    with closing(sqlite3.connect(run.store)) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
