"""Rollouts that are done, each for whoever waits for it: training and evaluation share one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from agl_core.types import Rollout

_HEALTH_INTERVAL = 2.0


class Queue(Protocol):
    """What the trainer needs of the rollout queue, near or far."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None: ...

    async def next_done(self) -> Rollout: ...

    def done_now(self) -> list[Rollout]: ...

    async def cancel(self, ids: Sequence[str]) -> None: ...


class Arrivals:
    """The queue for several who wait at once; who waits for a rollout gets it, however late he asks.

    `check_health` raises if a part of the run has died, so that nobody waits for ever.
    """

    def __init__(self, queue: Queue, check_health: Callable[[], None]) -> None:
        self._queue, self._check_health = queue, check_health
        self._expected: set[str] = set()
        self._arrived: dict[str, Rollout] = {}
        self._receiving: asyncio.Task[Rollout] | None = None
        self._waiting = 0

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the queue; each is to be taken once it is done, or cancelled."""
        ids = {rollout.id for rollout in rollouts}
        self._expected |= ids
        try:
            await self._queue.enqueue(rollouts)
        except BaseException:
            self._expected -= ids
            raise

    async def take(self, ids: Collection[str]) -> list[Rollout]:
        """Those of `ids` that are done, in the order in which they ended; waits until there is one."""
        self._waiting += 1
        try:
            while not (found := [id for id in self._arrived if id in ids]):
                await self._receive()
        finally:
            self._waiting -= 1
            if self._receiving is not None and not self._waiting:
                self._receiving.cancel()
                self._receiving = None
        return [self._arrived.pop(id) for id in found]

    async def cancel(self, ids: Collection[str]) -> None:
        """End these rollouts; nobody waits for them any more."""
        self._expected -= set(ids)
        for id in ids:
            self._arrived.pop(id, None)
        await self._queue.cancel(sorted(ids))

    async def _receive(self) -> None:
        """Wait for one more rollout, together with whoever else waits."""
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._queue.next_done())
            self._receiving.add_done_callback(self._received)
        done, _ = await asyncio.wait({self._receiving}, timeout=_HEALTH_INTERVAL)
        for task in done:
            task.result()
        if not done:
            self._check_health()

    def _received(self, task: asyncio.Task[Rollout]) -> None:
        if self._receiving is task:
            self._receiving = None
        if task.cancelled() or task.exception() is not None:
            return
        for rollout in (task.result(), *self._queue.done_now()):
            if rollout.id in self._expected:
                self._expected.remove(rollout.id)
                self._arrived[rollout.id] = rollout
