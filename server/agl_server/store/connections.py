"""The store's file: its tables, the lock of the one process that writes it, and connections to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from agl_core.errors import StoreError
from agl_server.store.codec import merge

BUSY_SECONDS = 10.0
"""How long to wait for another program's short lock."""
_PAGE = 8192
"""Bytes of a page of the file, about two rows of calls."""
_LOG_PAGES = 2048
"""Pages of the write-ahead log after which SQLite folds it into the store's file."""
PRIMARY_CODE = 0xFF
"""SQLite's extended error codes keep the plain code in their last byte."""
APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that another program's database is never written to."""
VERSION = 18
"""Grows with each change of the tables or of what a body holds: a file of another version is refused."""

SCHEMA = (
    "CREATE TABLE pieces (seq INTEGER PRIMARY KEY, data NOT NULL)",  # JSON text, or int32 tokens
    # The ids of rollouts that were removed, and must not come back.
    "CREATE TABLE erased (id TEXT PRIMARY KEY, time REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE runs (seq INTEGER PRIMARY KEY, id TEXT NOT NULL, restart INTEGER NOT NULL, body TEXT NOT NULL, "
    "UNIQUE (id, restart))",
    "CREATE TABLE rollouts (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, run TEXT NOT NULL, "
    'step INTEGER NOT NULL, mode TEXT NOT NULL, state TEXT NOT NULL, "group" TEXT NOT NULL, body TEXT NOT NULL)',
    "CREATE INDEX rollouts_by_step ON rollouts (step)",
    'CREATE INDEX rollouts_by_group ON rollouts ("group")',
    "CREATE INDEX rollouts_by_state ON rollouts (state)",
    # Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
    # writing gets slower as the file grows; so they stand in one small index, and the table with many rows is keyed
    # by the number of the attempt, which only grows.
    "CREATE TABLE attempts (seq INTEGER PRIMARY KEY, rollout TEXT NOT NULL, attempt INTEGER NOT NULL, "
    "UNIQUE (rollout, attempt))",
    # Attempts that run. Who removes the row of one ends it.
    "CREATE TABLE leases (rollout TEXT PRIMARY KEY, attempt INTEGER NOT NULL, worker TEXT NOT NULL, "
    "renewals INTEGER NOT NULL) WITHOUT ROWID",
    # Records of attempts. Only calls have pieces; calls and training records have arrays.
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, owner INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, "
    "pieces BLOB, arrays BLOB, body TEXT NOT NULL, UNIQUE (owner, kind, key))",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)


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


def connect_writer(path: Path) -> tuple[sqlite3.Connection, contextlib.ExitStack, int]:
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
                for statement in SCHEMA:
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
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is another program's SQLite database, not a store of agl. Choose another path.")
    if version != VERSION:
        raise StoreError(
            f"The store {path} has schema version {version}, which this agl cannot read (it reads {VERSION}): "
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
