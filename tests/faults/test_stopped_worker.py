"""A worker that is stopped while the run makes its last step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from .fault_run import PATIENCE, TinyRun


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
