"""A Store in memory: its writes take no thread, and a test can hold them up or let them fail."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from agl_core.errors import StoreError
from agl_core.store import Record
from agl_core.types import Attempt, AttemptKey, Ending, Rollout
from agl_server.store.codec import Pieces, merge
from agl_server.store.connections import SCHEMA
from agl_server.store.sqlite import GroupWriter, Preparation, Query, Result, SqliteStore


class MemoryStore(SqliteStore):
    """Clear `writable` to make writes wait; set `failing` to make them fail. `written` are all writes, in order."""

    def __init__(self) -> None:
        super().__init__(Path(":memory:"))
        self._writer = self._readers = _OnTheLoop()  # type: ignore[assignment]
        self.written: list[Record] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.write_waits = asyncio.Event()
        self.failing = False

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def _written(
        self, work: Callable[[GroupWriter], Awaitable[Result]], records: Sequence[Record] = ()
    ) -> Result:
        if not self.writable.is_set():
            self.write_waits.set()
        await self.writable.wait()
        if self.failing:
            raise StoreError("scripted failure")
        result = await super()._written(work, records)
        self.written += records if result else ()
        return result

    async def claim(self, worker: str, count: int, renewals: int) -> list[tuple[Rollout, Attempt]]:
        claimed = await super().claim(worker, count, renewals)
        self.written += chain.from_iterable(claimed)
        return claimed

    async def cancel_waiting(self, ids: Collection[str], ending: Ending) -> tuple[int, list[AttemptKey]]:
        before = await self.done(ids)
        cancelled = await super().cancel_waiting(ids, ending)
        self.written += [rollout for rollout in await self.done(ids) if rollout not in before]
        return cancelled


class _OnTheLoop(GroupWriter):
    """The one connection of a database in memory, which reads and writes at once."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.create_function("merged", 3, merge, deterministic=True)
        for statement in SCHEMA:
            self._connection.execute(statement)
        self._pieces = Pieces(1)

    def check(self) -> None: ...

    async def run(self, query: Query[Result]) -> Result:
        return query(self._connection)

    between_writes = run

    async def _write_later(self, prepare: Preparation[Result]) -> Result:
        work, pieces = prepare(), self._pieces.take()
        result: Any
        [result] = self._write_each(pieces, [work])
        if isinstance(result, Exception):
            self._pieces.give_back(pieces)
            raise result
        outcome: Result = result
        return outcome
