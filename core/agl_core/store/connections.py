"""Connections to the store's file: the one writer's, the readers', and what SQLite's errors on them mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store import schema
from agl_core.store.files import WriterLock, log_of

Result = TypeVar("Result")
Query = Callable[[sqlite3.Connection], Result]
Synchronous: TypeAlias = Literal["normal", "full"]

BUSY_SECONDS = 10.0
"""How long to wait for another program's short lock."""
_DAMAGED = (
    "is damaged. Copy the file, and save what is left with the sqlite3 program (`.recover`), or restore a backup."
)
_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database. Choose another path, or move that file away.",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full. Free some space, then go on (`agl train --resume`).",
    sqlite3.SQLITE_IOERR: "cannot be read or written by the system. Check the disk's free space, quota and health.",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened. Check that its folder exists and that you may write there.",
    sqlite3.SQLITE_PERM: "may not be accessed. Check the permissions of the file and its folder.",
    sqlite3.SQLITE_AUTH: "may not be accessed. Check the permissions of the file and its folder.",
    sqlite3.SQLITE_READONLY: "is read-only. Check the permissions of the file and its folder, and the file system.",
    sqlite3.SQLITE_BUSY: "is locked by another program. Close what has it open for writing, then try again.",
    sqlite3.SQLITE_LOCKED: "is locked by another program. Close what has it open for writing, then try again.",
    sqlite3.SQLITE_TOOBIG: "cannot hold a record of more than 1 GB. Make that record smaller.",
}

_PRIMARY_CODE = 0xFF
"""SQLite's extended error codes keep the plain code in their last byte."""


def connect_writer(path: Path, synchronous: Synchronous) -> tuple[sqlite3.Connection, WriterLock]:
    """A connection that creates the file if there is none, and the lock of the one that may.

    Usable from any one thread at a time. Raises StoreError, or sqlite3.Error.
    """
    _create(path)
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    lock: WriterLock | None = None
    try:
        schema.is_empty(connection, str(path))
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"The store {path} cannot use a write-ahead log there. Use a folder on a local disk of this machine."
            )
        schema.is_empty(connection, str(path))  # Now SQLite holds the file in this mode.
        lock = WriterLock(path)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # The writer decides when.
        connection.execute("PRAGMA cache_size = -16384")
        if schema.is_empty(connection, str(path)):
            schema.create(connection)
    except BaseException:
        connection.close()
        if lock is not None:
            lock.release()
        raise
    return connection, lock


def _create(path: Path) -> None:
    """Create the file for its owner alone, if there is none; SQLite gives the mode of a database to its log too."""
    with contextlib.suppress(OSError):  # SQLite's own error is clearer
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def connect_reader(path: Path, *, unchanging: bool) -> sqlite3.Connection:
    """A connection that never writes. Raises StoreError if the file's schema is not this agl's.

    `unchanging` opens a file that no process writes, and creates no log beside it, as SQLite would do.
    """
    if not path.is_file():
        raise StoreError(f"There is no store at {path}. Check the path, or start a run that makes it.")
    options = "mode=ro&immutable=1" if unchanging else "mode=ro"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if schema.is_empty(connection, str(path)):
            raise StoreError(f"The store {path} is empty. Check the path, or start a run that makes it.")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """What is written inside is written whole, or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check_folder(path: Path) -> None:
    """Raises StoreError unless a file can lie at `path`."""
    if not path.parent.is_dir():
        raise StoreError(f"The folder of the store {path} does not exist. Create {path.parent} first.")
    if path.is_dir():
        raise StoreError(f"{path} is a folder, and the store is a file. Choose another path.")


class Readers:
    """Runs queries, each in one read transaction: it sees everything that was committed before it began.

    `check` raises what makes reading useless: the writer that they read beside has lost its files.
    """

    def __init__(self, path: Path, check: Callable[[], None] | None) -> None:
        self._path, self._check = path, check
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="agl-store-reader")
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        self._unchanging: list[tuple[tuple[int, ...], sqlite3.Connection]] = []
        """Idle connections to the file while no process writes it, each with the mark of the file that it opened."""

    async def run(self, query: Query[Result]) -> Result:
        """The query's result. Raises StoreError, or sqlite3.Error."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        while not self._idle.empty():
            self._idle.get().close()
        while self._unchanging:
            self._unchanging.pop()[1].close()

    def _run(self, query: Query[Result]) -> Result:
        if self._check is not None:
            self._check()
        elif not log_of(self._path).exists():
            # No process writes: read without making a log. If a writer came meanwhile, what was read may be torn.
            try:
                result = self._run_unchanging(query)
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

    def _run_unchanging(self, query: Query[Result]) -> Result:
        mark = _mark(self._path)
        try:
            opened, connection = self._unchanging.pop()
        except IndexError:
            opened, connection = mark, connect_reader(self._path, unchanging=True)
        if opened != mark:  # A writer came and went: what this connection has of the file is old.
            connection.close()
            connection = connect_reader(self._path, unchanging=True)
        try:
            return _read(connection, query)
        finally:
            self._unchanging.append((mark, connection))


def _mark(path: Path) -> tuple[int, ...]:
    """Another one once another file is there, or it was written. StoreError if none is there."""
    try:
        found = path.stat()
    except OSError as error:
        raise StoreError(f"There is no store at {path}. Check the path, or start a run that makes it.") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(connection: sqlite3.Connection, query: Query[Result]) -> Result:
    connection.execute("BEGIN")
    try:
        return query(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def explain(path: Path, error: Exception, records: str = "a record") -> StoreError:
    """The StoreError for `error`, which is about the store at `path`, or about `records` that were to be written."""
    code = getattr(error, "sqlite_errorcode", None)
    meaning = None if code is None else _MEANINGS.get(code & _PRIMARY_CODE)
    if meaning is not None:
        return StoreError(f"The store {path} {meaning} (SQLite: {error})")
    if isinstance(error, sqlite3.OperationalError | sqlite3.InternalError):
        return StoreError(f"The store {path} cannot be used: {error}. Check the file, its folder and its disk.")
    return StoreRefusedError(f"The store {path} refused {records}: {error}. Correct it; nothing was written.")


def damaged(path: Path, error: Exception) -> StoreError:
    """The StoreError for a record that cannot be what was written."""
    return StoreError(f"The store {path} {_DAMAGED} ({type(error).__name__}: {error})")
