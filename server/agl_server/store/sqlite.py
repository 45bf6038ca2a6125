"""The default store: one SQLite file in WAL mode, one writer, any number of readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.kinds import NoOptions
from agl_core.store import Record, Store
from agl_core.types import Annotation, Attempt, AttemptKey, Ending, Reward, Rollout, ToolResult, TrainingRecord
from agl_server.store import queries
from agl_server.store.codec import PIECES, TABLES, Data, Pieces, Row, Rows, Table, encode, insertion, name_of
from agl_server.store.connections import BUSY_SECONDS, PRIMARY_CODE, connect_reader, connect_writer, log_of, transaction

P = ParamSpec("P")
Result = TypeVar("Result")
Query: TypeAlias = Callable[[sqlite3.Connection], Result]
Work: TypeAlias = Callable[[sqlite3.Connection], tuple[Result, Rows]]
"""A write that looks first: its result, and the rows to be written. It may be called again if others beside it fail."""
Batch: TypeAlias = list[tuple[Work[Any], asyncio.Future[Any]]]
Preparation: TypeAlias = Callable[[], Work[Result]]

logger = logging.getLogger(__name__)

_ROWS_PER_STATEMENT = 64
_PAUSE = 0.2
"""Seconds between tries to cut the log off, while a reader has it."""
_LINGER_TURNS = 60
"""Turns of the event loop that a transaction waits for more to write, if the one before it had several writes.

Each transaction costs more than what it writes, as it is between two threads. Turns are short where little is going
on; a caller that writes one record after the other does not wait at all.
"""
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


class Readers:
    """Runs queries, each in a transaction that sees all committed before it; `check` raises if the files are lost."""

    def __init__(self, path: Path, check: Callable[[], None] | None) -> None:
        self._path, self._check = path, check
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="agl-store-reader")
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    async def run(self, query: Query[Result]) -> Result:
        """Raises StoreError, or sqlite3.Error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        while not self._idle.empty():
            self._idle.get().close()

    def _run(self, query: Query[Result]) -> Result:
        if self._check is not None:
            self._check()
        elif not log_of(self._path).exists():
            # No process writes: read without making a log. If a writer came meanwhile, what was read may be torn.
            try:
                with contextlib.closing(connect_reader(self._path, unchanging=True)) as connection:
                    result = _read(connection, query)
            except sqlite3.Error:
                if not log_of(self._path).exists():
                    raise
            else:
                if not log_of(self._path).exists():
                    return result
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = connect_reader(self._path, unchanging=False)
        try:
            return _read(connection, query)
        finally:
            self._idle.put(connection)


def _read(connection: sqlite3.Connection, query: Query[Result]) -> Result:
    connection.execute("BEGIN")
    try:
        return query(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class GroupWriter:
    """The one writer. While a transaction runs in its thread, the next one gathers on the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection, self._lock, first = connect_writer(path)
        self._pieces = Pieces(first)
        self._opened = {file: _identity(file) for file in (path, log_of(path))}
        self._lost: StoreError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: list[tuple[Preparation[Any], asyncio.Future[Any]]] = []
        self._turns = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, records: Iterable[Record], may: Query[bool] = lambda connection: True) -> bool:
        """Write records, all or none, if they `may` be written; returns if they were. StoreError, or sqlite3.Error."""

        def prepare() -> Work[bool]:
            rows = encode(records, self._pieces)
            return lambda connection: (True, rows) if may(connection) else (False, {})

        return await self._write_later(prepare)

    async def write(self, work: Work[Result]) -> Result:
        """The result of `work`, once its rows are committed. It sees what work before it in the transaction changed."""
        return await self._write_later(lambda: work)

    async def _write_later(self, prepare: Preparation[Result]) -> Result:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((prepare, done))
        if self._idle.is_set():
            self._idle.clear()
            # Not at once: what else is put in this turn of the loop comes along.
            loop.call_soon(self._gather, self._turns)
        return await done

    async def close(self) -> None:
        """Finish what waits, then end the thread and close the connection and its lock."""
        await self._idle.wait()
        self._thread.submit(self._connection.close)
        await asyncio.to_thread(self._thread.shutdown)
        self._lock.close()

    async def between_writes(self, work: Query[Result]) -> Result:
        """Run `work`, which has the connection for itself."""

        def checked() -> Result:
            self.check()
            return work(self._connection)

        return await asyncio.get_running_loop().run_in_executor(self._thread, checked)

    async def remove(self, work: Query[Result]) -> Result:
        """The same; then the log is cut off, for what it removed."""
        last = time.monotonic() + BUSY_SECONDS
        result = await self.between_writes(work)
        while not await self.between_writes(self._cut_log_off):
            if time.monotonic() > last:
                logger.warning(
                    "A program has been reading the store %s for long: what was removed is in the log beside the store "
                    "until that program and this one have closed it.",
                    self._path,
                )
                break
            await asyncio.sleep(_PAUSE)
        return result

    async def erase(self, work: Callable[[sqlite3.Connection, int], Result]) -> Result:
        """Run `work`, which may remove pieces below the number that it gets: only records put before refer to them."""
        first = self._pieces.forget()
        await self.put(())
        return await self.remove(lambda connection: work(connection, first))

    def check(self) -> None:
        """Raise StoreError, from then on, if the files were removed, moved or replaced. For any thread.

        Writing to such files raises no error, but everything that is acknowledged then is lost when the process ends.
        """
        gone = [file for file, identity in self._opened.items() if _identity(file) != identity]
        if gone and self._lost is None:
            self._lost = StoreError(
                f"The store {self._path} can no longer be written: its file {gone[0]} was removed, moved or replaced. "
                f"Nothing is recorded any more, and no call is answered. Stop this process, put the file back or "
                f"restore a backup of the store, then start it again."
            )
        if self._lost is not None:
            raise self._lost

    def _cut_log_off(self, connection: sqlite3.Connection) -> bool:
        """Fold the write-ahead log into the store's file; False if a reader still needs it."""
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
        return not busy

    def _gather(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._gather, turns - 1)
            return
        # All are encoded here, one after the other: the code for it is in the processor's cache then.
        batch = [(_prepared(prepare, done), done) for prepare, done in self._waiting]
        self._waiting = []
        self._turns = _LINGER_TURNS if len(batch) > 1 else 0
        pieces, loop = self._pieces.take(), asyncio.get_running_loop()

        def write() -> None:
            results = self._write_each(pieces, [work for work, _ in batch])
            loop.call_soon_threadsafe(self._finish, pieces, batch, results)

        self._thread.submit(write)  # `run_in_executor` takes twice as long: it makes two futures and a chain of them

    def _finish(self, pieces: list[tuple[int, Data]], batch: Batch, results: list[Any]) -> None:
        if _all_failed(results):
            self._pieces.give_back(pieces)
        for (_, done), result in zip(batch, results, strict=True):
            if done.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)
        if self._waiting:
            self._gather(self._turns)
        else:
            self._idle.set()

    def _write_each(self, pieces: list[tuple[int, Data]], batch: list[Work[Any]]) -> list[Any]:
        """Write them together; if one of them makes that fail, one by one. Returns each one's result or error.

        Pieces are committed with the first that succeeds.
        """
        try:
            self.check()
            results = self._write(pieces, batch)
            self.check()
        except (sqlite3.OperationalError, StoreError) as error:  # the disk, the file or a lock: all fail alike
            return [error] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            results = []
            for work in batch:
                results += self._write_each(pieces if _all_failed(results) else [], [work])
        return results

    def _write(self, pieces: list[tuple[int, Data]], batch: list[Work[Any]]) -> list[Any]:
        with transaction(self._connection):
            done = [work(self._connection) for work in batch]
            self._insert(PIECES, pieces)
            for table in TABLES:
                self._insert(table, [row for _, rows in done for row in rows.get(table, ())])
        return [result for result, _ in done]

    def _insert(self, table: Table, rows: Sequence[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            values = tuple(chain.from_iterable(rows[start : start + count]))
            self._connection.execute(insertion(table, count), values)
            start += count


def _prepared(prepare: Preparation[Any], done: asyncio.Future[Any]) -> Work[Any]:
    """A caller's work; none for one that was cancelled, or whose records cannot be stored."""
    if not done.cancelled():
        try:
            return prepare()
        except Exception as error:  # The others go on.
            done.set_exception(error)
    return lambda connection: (None, {})


def _all_failed(results: list[Any]) -> bool:
    return all(isinstance(result, Exception) for result in results)


def _identity(file: Path) -> tuple[int, int] | None:
    """A file's device and inode, which renaming keeps; None if there is no such file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino
