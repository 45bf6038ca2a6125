"""Connections to the store's file: the one writer's, and the readers'."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from agl_core.errors import StoreError
from agl_core.store import Record
from agl_server.store import tables
from agl_server.store.codec import Data, Pieces, Row, Rows, encode, merge

Result = TypeVar("Result")
Query: TypeAlias = Callable[[sqlite3.Connection], Result]
Work: TypeAlias = Callable[[sqlite3.Connection], tuple[Result, Rows]]
"""A write that looks first: its result, and the rows to be written. It may be called again if others beside it fail."""
Batch: TypeAlias = list[tuple[Work[Any], asyncio.Future[Any]]]
Preparation: TypeAlias = Callable[[], Work[Result]]

logger = logging.getLogger(__name__)

BUSY_SECONDS = 10.0
"""How long to wait for another program's short lock."""
_PAGE = 8192
"""Bytes of a page of the file, about two rows of calls."""
_LOG_PAGES = 2048
"""Pages of the write-ahead log after which SQLite folds it into the store's file."""
_ROWS_PER_STATEMENT = 64
_PAUSE = 0.2
"""Seconds between tries to cut the log off, while a reader has it."""
_LINGER_TURNS = 60
"""Turns of the event loop that a transaction waits for more to write, if the one before it had several writes.

Each transaction costs more than what it writes, as it is between two threads. Turns are short where little is going
on; a caller that writes one record after the other does not wait at all.
"""
PRIMARY_CODE = 0xFF
"""SQLite's extended error codes keep the plain code in their last byte."""


def log_of(path: Path) -> Path:
    """The write-ahead log: it is there while a process writes, and after a crash."""
    return path.with_name(path.name + "-wal")


def lock_of(path: Path) -> Path:
    """An empty database beside the store, which the one process that writes holds locked, however it ends."""
    path = path.resolve()
    return path.with_name(path.name + ".lock")


def is_written(store: Path) -> bool:
    """True while a process writes the store."""
    if not lock_of(store).is_file():
        return False
    name = f"{lock_of(store).as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(name, timeout=0, uri=True)) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as error:
            return error.sqlite_errorcode & PRIMARY_CODE == sqlite3.SQLITE_BUSY
    return False


def _lock(store: Path) -> sqlite3.Connection:
    """Become the one that writes; until the connection is closed. StoreError if another process is it."""
    connection = sqlite3.connect(lock_of(store), timeout=1, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode & PRIMARY_CODE != sqlite3.SQLITE_BUSY:
            raise
        raise _second_writer(store) from None
    return connection


def _second_writer(store: Path) -> StoreError:
    return StoreError(
        f"The store {store} is being written by another process, and takes one writer at a time. Wait until it "
        f"ends, stop it, or use another folder; to look only, open it read-only."
    )


def _connect_writer(path: Path) -> tuple[sqlite3.Connection, contextlib.ExitStack, int]:
    """A connection that creates the file if there is none, the writer's lock, and the number of its first new piece.

    The connection is for one thread at a time; the lock is closed last. Raises StoreError, or sqlite3.Error.
    """
    if not path.parent.is_dir():
        raise StoreError(f"The folder of the store {path} does not exist. Create {path.parent} first.")
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(contextlib.ExitStack())
        lock.enter_context(contextlib.closing(_lock(path)))
        # For its owner alone; SQLite gives the mode of a database to its log too.
        file = os.open(path, os.O_CREAT, 0o600)
        lock.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # Somebody has removed the other lock's file.
            raise _second_writer(path) from None
        connection = opened.enter_context(contextlib.closing(_connect(path, "mode=rw")))
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        is_empty(connection, path)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"The store {path} cannot use a write-ahead log there. Use a folder on a local disk of this machine."
            )
        # An acknowledged call survives the kill of any process. A power cut may take the last seconds: to wait for the
        # disk with each group of calls would cost every call, for what a resumed run makes again.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA cache_size = -16384")
        connection.create_function("merged", 3, merge, deterministic=True)
        if is_empty(connection, path):
            with transaction(connection):
                for statement in tables.SCHEMA:
                    connection.execute(statement)
        # This also makes SQLite open the log.
        (first,) = connection.execute("SELECT ifnull(max(seq), 0) + 1 FROM pieces").fetchone()
        opened.pop_all()
        return connection, lock, first


def connect_reader(path: Path, *, unchanging: bool) -> sqlite3.Connection:
    """A connection that never writes. Raises StoreError if the file's schema is not this agl's.

    `unchanging` opens a file that no process writes, and creates no log beside it, as SQLite would do.
    """
    if not path.is_file():
        raise StoreError(f"There is no store at {path}. Check the path, or start a run that makes it.")
    connection = _connect(path, "mode=ro&immutable=1" if unchanging else "mode=ro")
    try:
        if is_empty(connection, path):
            raise StoreError(f"The store {path} is empty. Check the path, or start a run that makes it.")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )


def is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """True if the file has no tables yet. StoreError if it is not a store of this agl."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not (version or application or count):
        return True
    if application != tables.APPLICATION_ID:
        raise StoreError(f"{path} is another program's SQLite database, not a store of agl. Choose another path.")
    if version != tables.VERSION:
        raise StoreError(
            f"The store {path} has schema version {version}, which this agl cannot read (it reads {tables.VERSION}): "
            f"start a new run."
        )
    return False


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written inside is written whole, or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Readers:
    """Runs queries, each in a transaction that sees everything committed before it.

    `check` raises if the writer beside these readers has lost its files.
    """

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
    """The one writer. While a transaction runs in its thread, the next one gathers on the event loop.

    Each transaction checks before and after whether the files are still those that were opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection, self._lock, first = _connect_writer(path)
        self._pieces = Pieces(first)
        self._opened = {file: _identity(file) for file in (path, log_of(path))}
        self._lost: StoreError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-store-writer")
        self._waiting: list[tuple[Preparation[Any], asyncio.Future[Any]]] = []
        self._turns = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, records: Iterable[Record], may: Query[bool] = lambda connection: True) -> bool:
        """Write records, all or none, if they `may` be written; returns, once they are committed, whether they were.

        Raises StoreError for a record that cannot be stored, else SQLite's own error.
        """

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
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._checked, work)

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

    def _checked(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        self.check()
        return work(self._connection)

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
        else:
            self._start()

    def _start(self) -> None:
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
            self._insert(tables.PIECES, pieces)
            for table in tables.TABLES:
                self._insert(table, [row for _, rows in done for row in rows.get(table, ())])
        return [result for result, _ in done]

    def _insert(self, table: tables.Table, rows: Sequence[Row]) -> None:
        start = 0
        while start < len(rows):
            # Powers of two, so that the statements are few and stay prepared.
            count = min(_ROWS_PER_STATEMENT, 1 << (len(rows) - start).bit_length() - 1)
            values = tuple(chain.from_iterable(rows[start : start + count]))
            self._connection.execute(tables.insertion(table, count), values)
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
