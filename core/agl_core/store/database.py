"""Opening the store's file: the one writer and its lock, and connections that only read."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from agl_core.errors import StoreError
from agl_core.store import schema

_BUSY_SECONDS = 10.0
"""How long to wait for another program's short lock."""


class WriterLock:
    """Held by the one process that writes; the system releases it however that process ends.

    It is an SQLite database of its own (`store.sqlite.lock`) in which a transaction is kept open: that is an
    advisory lock on every platform, it is not inherited by forked children, and it leaves readers alone.
    """

    def __init__(self, store: Path) -> None:
        self._connection = sqlite3.connect(
            store.with_name(store.name + ".lock"), timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._hold(store)
        except BaseException:
            self._connection.close()
            raise

    def _hold(self, store: Path) -> None:
        try:
            self._connection.execute("BEGIN EXCLUSIVE")
            self._connection.execute(f"PRAGMA user_version = {os.getpid()}")
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise StoreError(
                f"The store {store} is being written by another process{self._holder()}, and takes one writer at a "
                f"time. Wait until it ends, stop it, or use another folder; to look only, open it read-only."
            ) from error

    def _holder(self) -> str:
        try:
            (process,) = self._connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            return ""
        return f" (process {process})"

    def release(self) -> None:
        self._connection.close()


def connect_writer(path: Path) -> sqlite3.Connection:
    """A connection that creates the file or brings it up to date; hold a `WriterLock` before.

    Usable from any one thread at a time. Raises StoreError, or sqlite3.Error.
    """
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        schema.version_of(connection, schema.MIGRATIONS, str(path))
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"The store {path} cannot use a write-ahead log there. Use a folder on a local disk of this machine."
            )
        # In WAL mode a commit then survives the kill of the process; only a power cut can undo the last ones.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA cache_size = -16384")
        schema.migrate(connection, schema.MIGRATIONS, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def log_of(path: Path) -> Path:
    """The write-ahead log: it is there while somebody writes, and after a crash."""
    return path.with_name(path.name + "-wal")


def connect_reader(path: Path, *, unchanging: bool) -> sqlite3.Connection:
    """A connection that never writes. Raises StoreError if the file's schema is not this agl's.

    `unchanging` opens a file that nobody writes without creating a log beside it, which SQLite would do.
    """
    if not path.is_file():
        raise StoreError(f"There is no store at {path}. Check the path, or start a run that makes it.")
    options = "mode=ro&immutable=1" if unchanging else "mode=ro"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        version = schema.version_of(connection, schema.MIGRATIONS, str(path))
        if version < len(schema.MIGRATIONS):
            raise StoreError(
                f"The store {path} has schema version {version}, this agl reads version {len(schema.MIGRATIONS)}. "
                f"Open it once for writing to bring it up to date (resume its run, for instance)."
            )
    except BaseException:
        connection.close()
        raise
    return connection


def check_folder(path: Path) -> None:
    """Raises StoreError unless a file can lie at `path`."""
    if not path.parent.is_dir():
        raise StoreError(f"The folder of the store {path} does not exist. Create {path.parent} first.")
    if path.is_dir():
        raise StoreError(f"{path} is a folder, and the store is a file. Choose another path.")
