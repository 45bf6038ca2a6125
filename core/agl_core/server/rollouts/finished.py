"""Rollouts that are done: those that memory keeps, the others in the store, and who waits for the next one."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Container
from typing import NamedTuple

from agl_core.errors import StoreRefusedError
from agl_core.server.errors import ApiError, stopping
from agl_core.store.interface import Store
from agl_core.types import Rollout, RolloutState


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

    async def known(self, ids: Collection[str]) -> dict[str, Rollout]:
        """Those of `ids` that are done, whether memory knows them or the store alone."""
        remembered = {id: self._ended[id].rollout for id in ids if id in self._ended}
        others = await asyncio.gather(*(self._stored(id) for id in ids if id not in remembered))
        return remembered | {rollout.id: rollout for rollout in others if rollout is not None}

    async def among(self, ids: Collection[str], alive: Container[str], wait: float | None) -> list[Rollout]:
        """Those of `ids` that are done, in the order in which they ended; waits until one is, or so many seconds.

        The others have to be `alive`: ApiError 404 if one is neither. 503 if this is stopped meanwhile.
        """
        loop = asyncio.get_running_loop()
        until = None if wait is None else loop.time() + wait
        wanted = set(ids)
        forgotten = [id for id in wanted if id not in alive and id not in self._ended]
        before = [await self._forgotten(id) for id in sorted(forgotten)]
        while True:
            found = sorted(self._ended[id] for id in wanted if id in self._ended)
            if found or before or not wanted:
                return before + [each.rollout for each in found]
            if self._stopped:
                raise stopping()
            waiter = loop.create_future()
            self._waiting[waiter] = wanted
            try:
                async with asyncio.timeout_at(until):
                    await waiter
            except TimeoutError:
                return []
            finally:
                del self._waiting[waiter]

    def stop(self) -> None:
        """Send away who waits."""
        self._stopped = True
        for waiter in self._waiting:
            _wake(waiter)

    async def _stored(self, id: str) -> Rollout | None:
        """The rollout as the store has it, if it is done."""
        try:
            rollout = await self._store.rollout(id)
        except StoreRefusedError:
            return None
        return rollout if rollout.id == id and rollout.state is RolloutState.DONE else None

    async def _forgotten(self, id: str) -> Rollout:
        rollout = await self._stored(id)
        if rollout is None:
            raise ApiError(
                404,
                f"There is no rollout {id!r} in the queue of this server. Add it first; is this the run's own server?",
                code="rollout_unknown",
            )
        return rollout


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
