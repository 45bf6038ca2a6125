"""A worker that is stopped, loses what it held, and comes back with it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterable

import psutil
import pytest

from agl_core.types import Attempt, AttemptKey, Ending

from .fault_checks import check_ended
from .fault_run import PATIENCE, Part, TinyRun

STEPS = 8


def held_by(run: TinyRun, pid: int) -> list[Attempt]:
    """The attempts of a worker."""
    return [attempt for attempt in run.recorded().attempts if f":{pid}:" in attempt.worker]


def has_asked(run: TinyRun, pid: int) -> bool:
    """Whether an agent that the worker runs just now got a reply in training."""
    asked = {entry["rollout"] for entry in run.acknowledged()}
    return bool(asked) and any(each.rollout in asked and each.ending is None for each in held_by(run, pid))


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    """To each that has not ended meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def lose_what_is_held(run: TinyRun, worker: Part, alone: bool) -> set[AttemptKey]:
    """Stop the worker, `alone` or with its agents, until it has lost its attempts; returns those.

    There may be none: it may just have reported all that it ran.
    """

    def ended_with(ending: Ending | None) -> set[AttemptKey]:
        return {attempt.key for attempt in held_by(run, worker.pid) if attempt.ending is ending}

    run.until(lambda: has_asked(run, worker.pid), "an agent of the worker got a reply")
    before, stopped = ended_with(Ending.LOST), [psutil.Process(worker.pid)]
    if not alone:  # Its agents too: they go on with calls of an attempt that is over.
        stopped += stopped[0].children(recursive=True)
    send(signal.SIGSTOP, stopped)
    run.until(lambda: not ended_with(None), "the stopped worker lost what it held")
    held = ended_with(Ending.LOST) - before
    begun = {AttemptKey(each["rollout"], each["attempt"]): each["pid"] for each in run.noted_as("begun")}
    ended = held & begun.keys() if alone else set()
    run.until(lambda: not any(psutil.pid_exists(begun[key]) for key in ended), "the agents ended")
    send(signal.SIGCONT, stopped[::-1])
    return held


@pytest.mark.timing
@pytest.mark.storm
def test_what_a_stopped_worker_comes_back_with_does_not_count(
    tiny_run: Callable[..., TinyRun], chance: random.Random
) -> None:
    run = tiny_run(**{"train.steps": STEPS, "workers.concurrency": 2})
    run.start()
    worker, alone = chance.choice(run.workers), chance.random() < 0.5
    held: set[AttemptKey] = set()
    while not held:
        held = lose_what_is_held(run, worker, alone)
    run.finish()
    check_ended(run, STEPS)

    recorded = run.recorded()
    counted = {(rollout.id, rollout.counted_attempt) for rollout in recorded.rollouts}
    assert not held & counted
    assert not {(record.rollout, record.attempt) for record in recorded.training_records} & held
    after = [attempt for attempt in recorded.attempts if attempt.key in held]
    assert {attempt.ending for attempt in after} == {Ending.LOST}


@pytest.mark.timing
@pytest.mark.storm
def test_a_worker_that_was_away_at_the_last_step_ends(tiny_run: Callable[..., TinyRun]) -> None:
    run = tiny_run(**{"train.steps": 2})
    run.start()
    worker = run.workers[0]
    run.until(lambda: has_asked(run, worker.pid), "an agent of the worker got a reply")
    os.kill(worker.pid, signal.SIGSTOP)
    run.trainer.process.wait(PATIENCE)
    os.kill(worker.pid, signal.SIGCONT)
    worker.process.wait(PATIENCE)
    run.finish()
    assert "the run is over" in worker.log.read_text()
