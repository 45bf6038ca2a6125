"""Rollouts per second of queue and store alone: no HTTP, no model, everything durable."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from server_records import recorded_call, some_rollouts

from agl_core.plugins import Plugins
from agl_core.server.keys import Keys
from agl_core.server.rollouts.queue import RolloutQueue
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Ending, Rollout
from agl_core.wire.workers import CloseRequest, LeaseRequest, RewardReport

A_STEP = 0.05
"""Seconds between two times that the trainer asks."""


@dataclass(frozen=True)
class Measured:
    """How many rollouts were done in how long."""

    rollouts: int
    seconds: float


class Trainer:
    """For each rollout that is done it adds a new one, some at a time."""

    def __init__(self, queue: RolloutQueue) -> None:
        self._queue = queue
        self.n_done = 0
        self.rollouts: dict[str, Rollout] = {}
        """Those that are not done."""
        self._added = asyncio.Event()

    async def add(self, n_rollouts: int) -> None:
        new = some_rollouts(n_rollouts)
        self.rollouts.update((each.id, each) for each in new)
        await self._queue.enqueue(new)
        self._added.set()

    async def train(self) -> None:
        await self._added.wait()
        while True:
            done = await self._queue.done(self.rollouts)
            for each in done:
                del self.rollouts[each.id]
            self.n_done += len(done)
            await self.add(len(done))
            await asyncio.sleep(A_STEP)


async def run_rollouts(path: Path, n_runners: int, turns: int, n_queued: int, seconds: float) -> Measured:
    """Runners lease a rollout each, record its calls one after the other, report its end, and go on with the next.

    Of `n_runners + n_queued` rollouts, those that are done are replaced at once.
    """
    async with SqliteStore(path) as store:
        queue = RolloutQueue(store, timeout=600, attempts=1, hook=Plugins().hook, keys=Keys())
        trainer = Trainer(queue)
        await trainer.add(n_runners + n_queued)
        training = asyncio.create_task(trainer.train())
        started = time.perf_counter()

        async def runner(name: str) -> None:
            while time.perf_counter() < started + seconds:
                for lease in (await queue.lease(LeaseRequest(worker=name, capacity=1, wait=5))).leases:
                    rollout = trainer.rollouts[lease.rollout]
                    for turn in range(turns):
                        await store.put(recorded_call(rollout, turn))
                    end = CloseRequest(ending=Ending.FINISHED, result="09:30", rewards=[RewardReport(value=1.0)])
                    await queue.close_attempt(AttemptKey(lease.rollout, lease.attempt), end)

        await asyncio.gather(*(runner(f"runner-{number}") for number in range(n_runners)))
        measured = Measured(trainer.n_done, time.perf_counter() - started)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        return measured
