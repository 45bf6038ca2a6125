"""A machine that fails: its wall clock jumps, its disk gets full, its disk loses the end of the store's log."""

from __future__ import annotations

import itertools
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agl_core.types import Ending

from .fault_checks import check_ended
from .fault_run import PATIENCE, TinyRun
from .fault_storm import wait_for_replies

ROOT = Path(__file__).parents[2]
LEASE = 8.0
JUMPING = 1.5 * LEASE
"""Seconds: so long that the server looks at least once at what is overdue."""
SETTLING = 2.0
YEAR = 365 * 86_400.0


@pytest.mark.timing
@pytest.mark.storm
def test_jumps_of_the_wall_clock_cost_nothing(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    run = tiny_run(**{"server.lease": LEASE})
    jump(run, 0.0)
    run.start()
    wait_for_replies(run, 1)
    # By a clock that goes ahead by more than a lease between any two heartbeats, every lease would be over.
    keep_jumping(run, JUMPING, (2 * LEASE * number for number in itertools.count(1)))
    keep_jumping(run, SETTLING, (chance.choice([-1, 1]) * YEAR ** chance.random() for _ in itertools.count()))
    wait_for_replies(run, 1)
    lost = [attempt for attempt in run.recorded().attempts if attempt.ending is Ending.LOST]
    assert lost == []
    jump(run, -2 * YEAR)
    steps = run.finish_after(2)
    check_ended(run, steps)
    started = [attempt.started - time.time() for attempt in run.recorded().attempts]
    assert min(started) < -YEAR


def keep_jumping(run: TinyRun, seconds: float, errors: Iterator[float]) -> None:
    """Make the wall clock wrong by one error after the other."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        jump(run, next(errors))
        time.sleep(0.05)


def jump(run: TinyRun, seconds: float) -> None:
    """Make the wall clock of all processes wrong by so much."""
    part = run.place / "clock.part"
    part.write_text(f"{seconds:.3f}")
    part.replace(run.place / "clock")


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


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""Where one may mount a disk of one's own, which nobody else sees."""


def may_mount() -> bool:
    try:
        return (
            subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


@pytest.mark.storm
@pytest.mark.timeout(3 * PATIENCE + 60)
@pytest.mark.skipif(not may_mount(), reason="this system lets users mount no disk of their own (unshare)")
def test_a_full_disk_only_costs_time(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "tests.faults.full_disk", tmp_path, str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
