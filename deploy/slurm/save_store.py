"""Copy a run's store to where it outlives this node: `save_store.py FROM TO`, two folders.

The server may be writing meanwhile: SQLite's backup reads the store as it is at one moment, with what is in its
write-ahead log, and lets the writer go on. TO gets each file at once and whole, so that this may be killed at any time:
then the files of the copy before are there. FROM needs room for a second copy.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

_STORE = "store.sqlite"
_PASSING = ("-wal", "-shm", "-journal", ".lock", ".snapshot", ".new")
"""How the names of files end that belong to a process, not to the run."""


def save(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    others = [file for file in source.iterdir() if file.is_file() and not file.name.startswith(_STORE)]
    for file in others:
        if not file.name.endswith(_PASSING):
            _put(file, target / file.name)
    snapshot = source / f"{_STORE}.snapshot"
    snapshot.unlink(missing_ok=True)
    try:
        _snapshot(source / _STORE, snapshot)
        _put(snapshot, target / _STORE)
    finally:
        snapshot.unlink(missing_ok=True)


def _snapshot(store: Path, copy: Path) -> None:
    """All of it in one step: with more than one, each write in between would start it anew."""
    with (
        closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=rw", uri=True, timeout=60)) as written,
        closing(sqlite3.connect(copy)) as taken,
    ):
        taken.execute("PRAGMA synchronous = OFF")
        written.backup(taken)


def _put(file: Path, target: Path) -> None:
    new = target.with_name(target.name + ".new")
    with file.open("rb") as reading, new.open("wb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 22)
        writing.flush()
        os.fsync(writing.fileno())
    new.replace(target)


if __name__ == "__main__":
    os.umask(0o077)  # there are keys among the files
    try:
        save(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"the store was not copied to {sys.argv[2]}, where the copy before it stays: {error}")
