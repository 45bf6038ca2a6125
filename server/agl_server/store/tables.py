"""The tables of the SQLite store's file: each record is JSON in a `body`, beside the columns that are looked for."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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
"""The statements that make a file."""


class Table(NamedTuple):
    """How rows of one table are written."""

    name: str
    columns: tuple[str, ...]
    row: str
    """Its values, in SQL."""
    conflict: str
    """The clause for a row whose key is there already."""


PIECES = Table("pieces", ("seq", "data"), "(?, ?)", "")
ATTEMPTS = Table("attempts", ("rollout", "attempt"), "(?, ?)", "ON CONFLICT DO NOTHING")
LEASES = Table("leases", ("rollout", "attempt", "worker", "renewals"), "(?, ?, ?, ?)", "")
RUNS = Table(
    "runs",
    ("id", "restart", "body"),
    "(?, ?, ?)",
    "ON CONFLICT (id, restart) DO UPDATE SET body = excluded.body",
)
ROLLOUTS = Table(
    "rollouts",
    ("id", "run", "step", "mode", "state", '"group"', "body"),
    "(?, ?, ?, ?, ?, ?, ?)",
    "ON CONFLICT (id) DO UPDATE SET run = excluded.run, step = excluded.step, mode = excluded.mode, "
    'state = excluded.state, "group" = excluded."group", body = excluded.body',
)
RECORDS = Table(
    "records",
    ("owner", "kind", "key", "pieces", "arrays", "body"),
    "((SELECT seq FROM attempts WHERE rollout = ? AND attempt = ?), ?, ?, ?, ?, ?)",
    "ON CONFLICT (owner, kind, key) DO UPDATE SET pieces = excluded.pieces, arrays = excluded.arrays, "
    "body = merged(kind, body, excluded.body)",
)
TABLES = (ATTEMPTS, RUNS, ROLLOUTS, RECORDS, LEASES)
"""In the order of writing, after pieces: what others refer to comes first."""


@cache
def insertion(table: Table, rows: int) -> str:
    """The statement that writes `rows` rows at once.

    Many rows in one statement, because sqlite3 gives up the interpreter lock once per statement: row by row,
    a busy event loop would make the writer wait for the lock at every row.
    """
    values = ", ".join([table.row] * rows)
    return f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES {values} {table.conflict}"
