"""Whatever is killed, stopped or missing, and whenever: what was acknowledged is there, and all is trained on once."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import orjson
import pytest
from typer.testing import CliRunner

from agl_core.cli import app

from .fault_run import PATIENCE, TinyRun
from .fault_storm import drawn_settings, storm

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
    os.kill(worker.pid, signal.SIGSTOP)
    run.trainer.process.wait(PATIENCE)
    os.kill(worker.pid, signal.SIGCONT)
    worker.process.wait(PATIENCE)
    run.finish()
    assert "the run is over" in worker.log.read_text()


def test_a_run_without_a_worker_says_who_waits_for_whom(tiny_run: Callable[..., TinyRun]) -> None:
    """In its terminal, in its metrics and to `agl doctor RUN`."""
    run = tiny_run(workers=0, **{"train.steps": 1, "eval.every": 0, "alarms.stall": 2.0})
    run.start()
    run.until(lambda: "alarm stall" in run.trainer.log.read_text(), "the run said that it stalls")
    [stall, *_] = [line for line in run.trainer.log.read_text().splitlines() if "alarm stall" in line]
    assert "no worker runs a rollout, and 4 wait in the queue" in stall
    assert "Start a worker: agl worker RUN" in stall
    doctor = CliRunner().invoke(app, ["doctor", str(run.folder)]).output
    assert "FAIL  waiting: no worker runs a rollout, and 4 wait in the queue" in doctor
    run.begin("worker 0")
    run.finish()
    [line] = [orjson.loads(line) for line in (run.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert line["alarm/stall"] == 1.0
    assert {alarm["name"] for alarm in line["alarms"]} == {"stall"}
