"""A run in which nothing goes on says who waits for whom, in its terminal, in its metrics and to `agl doctor RUN`."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from typer.testing import CliRunner

from agl_core.cli import app

from .fault_run import TinyRun


def test_a_run_without_a_worker(tiny_run: Callable[..., TinyRun]) -> None:
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
