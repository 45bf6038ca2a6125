"""The wall clock jumps, forwards and backwards, by years: leases, timeouts and training run by the other clock."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest

from agl_core.types import Ending

from .fault_checks import check_ended
from .fault_run import TinyRun
from .fault_storm import wait_for_replies

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
