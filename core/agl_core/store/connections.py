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
from agl_core.store import tables
from agl_core.store.files import WriterLock, log_of

Result = TypeVar("Result")
Query = Callable[[sqlite3.Connection], Result]
Synchronous: TypeAlias = Literal["normal", "full"]

BUSY_SECONDS = 10.0
"""How long to wait for another program's short lock."""
_LOG_PAGES = 4096
"""Pages of 4 KiB of the write-ahead log from which on SQLite folds it into the store's file, after a commit."""
_DAMAGED = (
    "is damaged. Copy the file, and save what is left with the sqlite3 program (`.recover`), or restore a backup."
)
_PERMISSIONS = "Check the permissions of the file and its folder"
_LOCKED = "is locked by another program. Close what has it open for writing, then try again."
_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database. Choose another path, or move that file away.",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full. Free some space, then go on (`agl train --resume`).",
    sqlite3.SQLITE_IOERR: "cannot be read or written by the system. Check the disk's free space, quota and health.",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened. Check that its folder exists and that you may write there.",
    sqlite3.SQLITE_PERM: f"may not be accessed. {_PERMISSIONS}.",
    sqlite3.SQLITE_AUTH: f"may not be accessed. {_PERMISSIONS}.",
    sqlite3.SQLITE_READONLY: f"is read-only. {_PERMISSIONS}, and the file system.",
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_TOOBIG: "cannot hold a record of more than 1 GB. Make that record smaller.",
}
_PRIMARY_CODE = 0xFF
"""SQLite's extended error codes keep the plain code in their last byte."""


def connect_writer(path: Path, synchronous: Synchronous) -> tuple[sqlite3.Connection, WriterLock]:
    """A connection that creates the file if there is none, and the lock of the one that may.

    Usable from any one thread at a time. Raises StoreError, or sqlite3.Error.
    """
    if not path.parent.is_dir():
        raise StoreError(f"The folder of the store {path} does not exist. Create {path.parent} first.")
    if path.is_dir():
        raise StoreError(f"{path} is a folder, and the store is a file. Choose another path.")
    with contextlib.suppress(OSError):  # SQLite's own error is clearer
        # For its owner alone; SQLite gives the mode of a database to its log too.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    connection = _connect(str(path), cached_statements=256)
    lock: WriterLock | None = None
    try:
        is_empty(connection, path)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"The store {path} cannot use a write-ahead log there. Use a folder on a local disk of this machine."
            )
        is_empty(connection, path)  # Now SQLite holds the file in this mode.
        lock = WriterLock(path)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        connection.execute("PRAGMA cache_size = -16384")
        if is_empty(connection, path):
            with transaction(connection):
                for statement in tables.SCHEMA:
                    connection.execute(statement)
    except BaseException:
        connection.close()
        if lock is not None:
            lock.release()
        raise
    return connection, lock


def connect_reader(path: Path, *, unchanging: bool) -> sqlite3.Connection:
    """A connection that never writes. Raises StoreError if the file's schema is not this agl's.

    `unchanging` opens a file that no process writes, and creates no log beside it, as SQLite would do.
    """
    if not path.is_file():
        raise StoreError(f"There is no store at {path}. Check the path, or start a run that makes it.")
    connection = _connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if unchanging else ''}", uri=True)
    try:
        if is_empty(connection, path):
            raise StoreError(f"The store {path} is empty. Check the path, or start a run that makes it.")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(name: str, *, cached_statements: int = 128, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        *(name, BUSY_SECONDS),
        isolation_level=None,
        check_same_thread=False,
        cached_statements=cached_statements,
        uri=uri,
    )


def is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has no tables yet. StoreError if it is not a store of this agl."""
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
    """What is written inside is written whole, or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class Readers:
    """Runs queries, each in one read transaction: it sees everything that was committed before it began.

    `check` raises what makes reading useless: the writer that they read beside has lost its files.
    """

    def __init__(self, path: Path, check: Callable[[], None] | None) -> None:
        self._path, self._check = path, check
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="agl-store-reader")
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()

    async def run(self, query: Query[Result]) -> Result:
        """The query's result. Raises StoreError, or sqlite3.Error."""
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
