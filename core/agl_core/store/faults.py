"""What SQLite's errors mean for the user: the file, what happened, and what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from agl_core.errors import StoreError, StoreRefusedError

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


def explain(path: Path, error: Exception, records: str = "a record") -> StoreError:
    """The StoreError for what `error` says about the store at `path`, or about `records` that were to be written."""
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
