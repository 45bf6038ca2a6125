"""A run in which nothing goes on says who waits for whom, in its terminal and to `agl doctor RUN`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
from typer.testing import CliRunner

from agl_core.cli import app

from .fault_run import TinyRun
from .stall_agent import HELD

STALL = 2.0
HERE = Path(__file__).parent


def stalling(tiny_run: Callable[..., TinyRun], place: Path, **arguments: object) -> TinyRun:
    """A run of three steps, whose agents use a tool that hangs as long as `place` is a file."""
    return tiny_run(
        environment={HELD: str(place)},
        plugins=[str(HERE / "fault_parts.py"), str(HERE / "stall_parts.py")],
        **{
            "agent.entry": "stall_agent:solve",
            "engine.name": "apart",
            "train.steps": 3,
            "eval.every": 0,
            "workers.timeout": 300.0,
            "alarms.stall": STALL,
            **arguments,
        },
    )


def stalls(run: TinyRun) -> list[str]:
    """What the trainer's terminal says of stalls."""
    return [line for line in run.trainer.log.read_text().splitlines() if "alarm stall" in line]


def doctor(run: TinyRun) -> str:
    return CliRunner().invoke(app, ["doctor", str(run.folder)]).output


def finish(run: TinyRun) -> None:
    """To its end; the metrics have the alarm of the stall."""
    run.finish()
    lines = [orjson.loads(line) for line in (run.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert any(line.get("alarm/stall") == 1.0 for line in lines)
    assert any(alarm["name"] == "stall" and alarm["seen"] for line in lines for alarm in line.get("alarms", ()))


def test_no_worker(tiny_run: Callable[..., TinyRun], tmp_path: Path) -> None:
    run = stalling(tiny_run, tmp_path / "held", workers=0)
    run.start()
    run.until(lambda: stalls(run), "the run said that it stalls")
    assert "no worker runs a rollout, and 4 wait in the queue" in stalls(run)[0]
    assert "Start a worker: agl worker RUN" in stalls(run)[0]
    found = doctor(run)
    assert "FAIL  waiting: no worker runs a rollout, and 4 wait in the queue" in found
    run.begin("worker 0")
    finish(run)


def test_a_tool_that_hangs_and_then_an_engine_that_is_stopped(tiny_run: Callable[..., TinyRun], tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    run = stalling(tiny_run, held, workers=1)
    run.start()
    run.until(lambda: any("in the tool 'search'" in line for line in stalls(run)), "the run named the tool")
    line = next(line for line in stalls(run) if "in the tool 'search'" in line)
    assert "See what the tool 'search' waits for" in line
    assert "1 rollouts wait in the queue, because all workers are busy (1 with 3 attempts" in line

    engine = psutil.Process(int((run.folder / "engine.pid").read_text()))
    engine.send_signal(signal.SIGSTOP)
    held.unlink()
    try:
        run.until(lambda: any("the engine does not answer" in line for line in stalls(run)), "the run named the engine")
        assert "the engine does not answer 3 model calls" in doctor(run)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    finish(run)
