"""A storm: the processes of a run are killed at random moments, one after the other; each is started again at once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .fault_checks import check_acknowledged, check_ended
from .fault_run import TRAINER, TinyRun

AGENT, WORKER = "agent", "worker"

_LAST_STEPS = 2
_STARTING = 4.0
"""Seconds: a part that was started again is still starting for some of them."""
_MOST_REPLIES = 15
_LONGEST_PAUSE = 0.5


def drawn_settings(chance: random.Random) -> dict[str, Any]:
    """What differs between storms: how often a checkpoint is written, evaluations, and asynchronous training."""
    settings: dict[str, Any] = {
        "train.checkpoint_every": chance.choice([1, 1, 2, 3]),
        "async.max_staleness": chance.choice([0, 0, 2]),
    }
    return {**settings, "tasks.eval": {"source": "counting"}} if chance.random() < 0.5 else settings


def storm(run: TinyRun, chance: random.Random, kills: int) -> Iterator[str]:
    """Start a run without end, kill something `kills` times, then have the run end; yields what was killed.

    What was acknowledged is looked for after every kill, and everything else at the end.
    """
    run.start()
    wait_for_replies(run, 1)
    for victim in _victims([TRAINER, WORKER, AGENT], chance, kills):
        _kill(run, chance, victim)
        if run.acknowledged():
            check_acknowledged(run)
        yield victim
    wait_for_replies(run, 1)
    check_ended(run, run.finish_after(_LAST_STEPS))


def wait_for_replies(run: TinyRun, more: int) -> None:
    """Until agents got so many more replies."""
    enough = len(run.acknowledged()) + more
    run.until(lambda: len(run.acknowledged()) >= enough, f"agents got {more} more replies")


def _victims(kinds: Sequence[str], chance: random.Random, kills: int) -> list[str]:
    """Each kind about as often as any other, in random order."""
    victims = [kinds[number % len(kinds)] for number in range(kills)]
    chance.shuffle(victims)
    return victims


def _kill(run: TinyRun, chance: random.Random, victim: str) -> None:
    """Kill one at a random moment: while agents get replies, or while something may still be starting."""
    if chance.random() < 0.3:
        time.sleep(chance.uniform(0, _STARTING))
    else:
        wait_for_replies(run, chance.randint(1, _MOST_REPLIES))
        time.sleep(chance.uniform(0, _LONGEST_PAUSE))
    if victim == AGENT:
        run.until(run.running_agents, "an agent was running")
        for agent in run.running_agents()[:1]:
            with contextlib.suppress(ProcessLookupError):  # It has ended just now.
                os.kill(agent, signal.SIGKILL)
        return
    name = chance.choice([part.name for part in run.workers]) if victim == WORKER else victim
    run.parts[name].kill()
    run.begin(name)
