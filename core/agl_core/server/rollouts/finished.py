"""Rollouts that are done: those that memory keeps, the others in the store, and who waits for the next one."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Container
from typing import NamedTuple

from agl_core.server.errors import stopping
from agl_core.store.interface import Store
from agl_core.types import Rollout


class _Ended(NamedTuple):
    number: int
    """Which it was of all that ended here."""
    rollout: Rollout


class Finished:
    """The last `kept` of them are in memory."""

    def __init__(self, store: Store, kept: int) -> None:
        self._store, self._kept = store, kept
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._count = 0
        self._waiting: dict[asyncio.Future[None], Container[str]] = {}
        self._stopped = False
        self.latest: float | None = None
        """When the latest one ended, in Unix seconds."""

    def add(self, rollout: Rollout) -> None:
        self._count += 1
        self.latest = time.time()
        self._ended[rollout.id] = _Ended(self._count, rollout)
        if len(self._ended) > self._kept:
            self._ended.popitem(last=False)
        for waiter, wanted in self._waiting.items():
            if rollout.id in wanted:
                _wake(waiter)

    async def among(self, ids: Collection[str], alive: Container[str]) -> list[Rollout]:
        """Those of `ids` that are done, in the order in which they ended; waits until one is.

        The others are `alive`. ApiError 503 if this is stopped meanwhile.
        """
        wanted = set(ids)
        forgotten = [id for id in wanted if id not in alive and id not in self._ended]
        before = [await self._store.rollout(id) for id in sorted(forgotten)]
        while True:
            found = sorted(self._ended[id] for id in wanted if id in self._ended)
            if found or before or not wanted:
                return before + [each.rollout for each in found]
            if self._stopped:
                raise stopping()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = wanted
            try:
                await waiter
            finally:
                del self._waiting[waiter]

    def stop(self) -> None:
        """Send away who waits."""
        self._stopped = True
        for waiter in self._waiting:
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
