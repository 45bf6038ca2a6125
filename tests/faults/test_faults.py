"""Whatever is killed, stopped, cut off or full, and whenever: what was acknowledged is there, and trained on once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from running_servers import free_port

from agl_core.types import Ending
from agl_core.wire import WORKER_KEY

from .fault_agent import RETRIES
from .fault_checks import check_ended, drawn_settings, storm, wait_for_replies
from .fault_proxy import FaultyProxy
from .fault_run import PATIENCE, TRAINER, TinyRun

KILLS = 6
STORMS = int(os.environ.get("AGL_FAULT_STORMS", "1"))


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(STORMS))
def test_kills_at_random_moments_only_cost_time(tiny_run: Callable[..., TinyRun], seed: int, number: int) -> None:
    chance = random.Random(f"{seed}-{number}")
    run = tiny_run(**drawn_settings(chance))
    assert len(list(storm(run, chance, KILLS))) == KILLS


@pytest.mark.timing
@pytest.mark.storm
def test_a_worker_that_was_away_at_the_last_step_ends(tiny_run: Callable[..., TinyRun]) -> None:
    run = tiny_run(**{"train.steps": 2})
    run.start()
    worker = run.workers[0]
    run.until(run.acknowledged, "an agent got a reply")
    os.kill(worker.process.pid, signal.SIGSTOP)
    run.trainer.process.wait(PATIENCE)
    os.kill(worker.process.pid, signal.SIGCONT)
    worker.process.wait(PATIENCE)
    run.finish()
    assert "the run is over" in worker.output()


STEPS = 6


@pytest.mark.storm
def test_between_worker_and_server_and_between_agent_and_gateway(
    tiny_run: Callable[..., TinyRun], chance: random.Random
) -> None:
    port = free_port()
    with FaultyProxy(f"http://127.0.0.1:{port}", chance, share=0.3) as proxy:
        run = tiny_run(
            server=proxy.url,
            environment={WORKER_KEY: "a-key-of-our-choice"},
            **{"server.port": port, "workers.timeout": 10.0},
        )
        run.start()
        run.until(lambda: proxy.broken == {"worker", "agent"}, "some of both broke")
        steps = run.finish_after(2)
    check_ended(run, steps)


@pytest.mark.storm
def test_between_gateway_and_model_server(tiny_run: Callable[..., TinyRun], seed: int) -> None:
    run = tiny_run(**{"train.steps": STEPS, "engine.ledger": {"seed": seed, "breaking": 0.3}})
    run.start()
    run.finish()
    check_ended(run, STEPS)


@pytest.mark.storm
def test_if_the_model_server_fails_agents_get_errors_and_training_goes_on(
    tiny_run: Callable[..., TinyRun], seed: int
) -> None:
    run = tiny_run(
        environment={RETRIES: "0"},
        **{"train.steps": STEPS, "workers.timeout": 5.0, "engine.ledger": {"seed": seed, "failing": 0.2}},
    )
    run.start()
    run.finish()
    check_ended(run, STEPS)
    failed = Counter(note["error"] for note in run.noted_as("failed"))
    endings = Counter(attempt.ending for attempt in run.recorded().attempts)
    assert failed["InternalServerError"], failed
    assert endings[Ending.LOST] > 0, endings
    assert set(endings) <= {Ending.FINISHED, Ending.CRASHED, Ending.TIMED_OUT, Ending.LOST}, endings
    assert endings[Ending.FINISHED] > STEPS, endings


ROOT = Path(__file__).parents[2]
LEASE = 8.0
JUMPING = 1.5 * LEASE
"""Seconds: so long that the server looks at least once at what is overdue."""
SETTLING = 2.0
YEAR = 365 * 86_400.0


@pytest.mark.timing
@pytest.mark.storm
def test_jumps_of_the_wall_clock_cost_nothing(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    run = tiny_run(environment={"AGL_FAULTS_LEASE": str(LEASE)})
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
    part = run.root / "clock.part"
    part.write_text(f"{seconds:.3f}")
    part.replace(run.root / "clock")


@pytest.mark.storm
def test_a_damaged_log_is_read_up_to_the_damage(tiny_run: Callable[..., TinyRun], chance: random.Random) -> None:
    """That is what SQLite does with a log that was cut off: what came later was never there, and training goes on."""
    run = tiny_run(workers=1)
    run.start()
    wait_for_replies(run, 15)
    run.trainer.kill()
    log = run.store.with_name(run.store.name + "-wal")
    whole = log.read_bytes()
    cut = chance.randrange(len(whole) // 2, len(whole))
    log.write_bytes(whole[:cut] + chance.choice([b"", chance.randbytes(len(whole) - cut)]))
    run.begin(TRAINER)
    wait_for_replies(run, 5)
    steps = run.finish_after(1)
    assert run.summary()["steps"] == steps
    with closing(sqlite3.connect(run.store)) as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""A place where a user can mount a disk that no other process sees."""


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
