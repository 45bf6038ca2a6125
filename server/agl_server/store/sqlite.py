"""The default store: one SQLite file in WAL mode, one writer, any number of readers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.kinds import NoOptions
from agl_core.store import Record, Store
from agl_core.types import Annotation, Attempt, AttemptKey, Ending, Reward, Rollout, ToolResult, TrainingRecord
from agl_server.store import queries
from agl_server.store.codec import name_of
from agl_server.store.connections import PRIMARY_CODE, GroupWriter, Query, Readers

P = ParamSpec("P")
Result = TypeVar("Result")
_NOT_OPEN = "The store {} is not open. Open it first (`async with`), and do not use it once closed."
_DAMAGED = (
    "is damaged. Copy the file, and save what is left with the sqlite3 program (`.recover`), or restore a backup."
)
_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database. Choose another path, or move that file away.",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full. Free some space, then start again; a run that had "
    "begun goes on (`agl train --resume`).",
    sqlite3.SQLITE_BUSY: "is locked by another program. Close what has it open for writing, then try again.",
}


def _reading(
    query: Callable[Concatenate[sqlite3.Connection, P], Result],
) -> Callable[Concatenate[SqliteStore, P], Coroutine[Any, Any, Result]]:
    """The method of the store that runs a query."""

    async def method(store: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await store.read(lambda connection: query(connection, *args, **kwargs))

    return method


class SqliteStore(Store):
    """A `Store` in one SQLite file; see that protocol for what each method promises.

    One process may write; a second writer is refused with a StoreError. Other processes may read meanwhile:

        async with SqliteStore(folder / "store.sqlite", read_only=True) as store:
            rollout = await store.rollout("3f2a")

    A read-only store creates no file and never waits for the writer. All methods belong to the event loop
    that opened the store. Raises StoreError, naming the file and the remedy.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path, self._read_only = path, read_only
        self.failure: Exception | None = None
        self._readers: Readers | None = None
        self._writer: GroupWriter | None = None
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        if self._readers is not None:
            raise StoreError(f"The store {self._path} is open already. Open it once, and share it.")
        async with AsyncExitStack() as opened:
            try:
                if not self._read_only:
                    self._writer = await asyncio.to_thread(GroupWriter, self._path)
                    # It is closed last: the connection that closes last folds the log into the file.
                    opened.push_async_callback(self._writer.close)
                readers = Readers(self._path, None if self._writer is None else self._writer.check)
                opened.push_async_callback(readers.close)
                await readers.run(lambda connection: None)
            except (sqlite3.Error, OSError) as error:
                raise error if isinstance(error, StoreError) else self._explain(error) from error
            self._readers, self._opened = readers, opened.pop_all()

    async def close(self) -> None:
        self._readers = None
        await self._opened.aclose()

    async def put(self, *records: Record) -> None:
        await self._written(lambda writer: writer.put(records), records)

    async def end(self, attempt: AttemptKey, *records: Record) -> bool:
        return await self._written(lambda writer: writer.put(records, partial(queries.end_lease, key=attempt)), records)

    async def claim(self, worker: str, count: int, renewals: int) -> list[tuple[Rollout, Attempt]]:
        claim = partial(queries.claim, worker=worker, count=count, renewals=renewals)
        return await self._written(lambda writer: writer.write(claim))

    async def renew(self, worker: str, attempts: Collection[AttemptKey]) -> set[AttemptKey]:
        return await self._written(lambda writer: writer.write(partial(queries.renew, worker=worker, keys=attempts)))

    async def cancel_waiting(self, ids: Collection[str], ending: Ending) -> tuple[int, list[AttemptKey]]:
        return await self._written(
            lambda writer: writer.between_writes(partial(queries.cancel_waiting, ids=ids, ending=ending))
        )

    async def rollout(self, prefix: str) -> Rollout:
        return await self.read(partial(queries.rollout, prefix=prefix, where=str(self._path)))

    leases = _reading(queries.leases)
    done = _reading(queries.done)
    runs = _reading(queries.runs)
    rollouts = _reading(queries.rollouts)
    attempts = _reading(queries.attempts)
    calls = _reading(queries.calls)
    tool_results = _reading(partial(queries.recorded, kind=ToolResult))
    rewards = _reading(partial(queries.recorded, kind=Reward))
    training_records = _reading(partial(queries.recorded, kind=TrainingRecord))
    annotations = _reading(partial(queries.recorded, kind=Annotation))
    erased = _reading(queries.erased)
    ended_before = _reading(queries.ended_before)

    async def erase(self, ids: Iterable[str]) -> int:
        rollouts = tuple(ids)
        return await self._written(lambda writer: writer.erase(partial(queries.erase_rollouts, ids=rollouts)))

    async def vacuum(self) -> None:
        """Write the file anew, without its unused space. Meanwhile that needs as much free space again."""
        await self._written(lambda writer: writer.remove(lambda connection: connection.execute("VACUUM")))

    async def _written(
        self, work: Callable[[GroupWriter], Awaitable[Result]], records: Sequence[Record] = ()
    ) -> Result:
        if self._read_only:
            raise StoreError(
                f"The store {self._path} was opened to read only. Write through the process that runs the training."
            )
        if self._readers is None or self._writer is None:
            raise StoreError(_NOT_OPEN.format(self._path))
        try:
            return await work(self._writer)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            failure = self._explain(error, " or ".join(map(name_of, records)) or "a record")
            if not isinstance(failure, StoreRefusedError):
                self.failure = failure
            raise failure from error

    async def read(self, query: Query[Result]) -> Result:
        """The result of a query. StoreError if the file is damaged or cannot be read."""
        if self._readers is None:
            raise StoreError(_NOT_OPEN.format(self._path))
        try:
            return await self._readers.run(query)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except (TypeError, ValueError, LookupError) as error:  # SQLite does not notice damage inside a value.
            raise StoreError(f"The store {self._path} {_DAMAGED} ({type(error).__name__}: {error})") from error

    def _explain(self, error: Exception, records: str = "a record") -> StoreError:
        """The StoreError for an error of the file, or of `records` that were to be written."""
        code = getattr(error, "sqlite_errorcode", 0) & PRIMARY_CODE
        if code in _MEANINGS:
            return StoreError(f"The store {self._path} {_MEANINGS[code]} (SQLite: {error})")
        if isinstance(error, sqlite3.OperationalError | sqlite3.InternalError | OSError):
            return StoreError(
                f"The store {self._path} cannot be used: {error}. Check that you may write the file and its folder, "
                f"and the disk's free space and health."
            )
        return StoreRefusedError(f"The store {self._path} refused {records}: {error}. Correct it; nothing was written.")


def build(options: NoOptions, folder: Path, read_only: bool = False) -> SqliteStore:
    """One SQLite file in the run's folder; readable while training runs."""
    return SqliteStore(folder / "store.sqlite", read_only=read_only)
