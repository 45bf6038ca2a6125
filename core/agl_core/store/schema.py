"""What the SQLite store's tables look like, and how an older file becomes a current one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from agl_core.errors import StoreError

APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that somebody else's database is never written to."""


@dataclass(frozen=True, eq=False)
class Table:
    """One table as it is written: the order of a row's values, and what makes two rows the same."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    """The columns that name a row."""
    index: str = ""
    """What its unique index is on, where that is not just the key's columns."""
    again: Literal["replace", "keep", "fail"] = "replace"
    """What to do with an earlier row that has the same key."""

    @property
    def values(self) -> tuple[str, ...]:
        """What a row's values are: the columns, with rollout and attempt for the number that stands for both."""
        if self.columns[0] != "attempt_key":
            return self.columns
        return ("rollout", "attempt", *self.columns[1:])


ATTEMPT_KEYS = Table("attempt_keys", ("rollout", "attempt"), ("rollout", "attempt"), again="keep")
PIECES = Table("pieces", ("seq", "data"), ("seq",), again="fail")
RUNS = Table("runs", ("id", "incarnation", "started", "config", "resumed_step"), ("id", "incarnation"))
ROLLOUTS = Table(
    "rollouts",
    ("id", "run", "incarnation", "grp", "task", "mode", "step", "member", "state", "counted_attempt", "ending"),
    ("id",),
)
ATTEMPTS = Table(
    "attempts",
    ("attempt_key", "worker", "started", "ended", "ending", "result", "error"),
    ("attempt_key",),
)
CALLS = Table(
    "calls",
    (
        *("attempt_key", "id", "sequence", "policy", "version", "request", "request_lists", "request_pieces"),
        *("n_choices", "started", "ended", "api", "agent", "parent_span", "prompt_blocks", "prompt_tail"),
        *("requested", "effective", "prefix_broken", "prefilled", "reused", "late", "retry_of", "state"),
    ),
    ("attempt_key", "id"),
)
CHOICES = Table(
    "choices",
    (
        *("attempt_key", "call", "position", "choice", "message", "finish_reason"),
        *("response_ids", "logprobs", "mask", "parse_error"),
    ),
    ("attempt_key", "call", "position"),
)
OUTCOMES = Table(
    "outcomes",
    (
        *("attempt_key", "id", "tool", "status", "tool_call_id", "arguments", "result", "error"),
        *("agent", "span", "parent_span", "started", "ended"),
    ),
    ("attempt_key", "id"),
)
REWARDS = Table(
    "rewards",
    ("attempt_key", "name", "value", "source", "call", "choice"),
    ("attempt_key", "name", "source", "call", "choice"),
    # NULLs are never equal in a unique index, but two terminal rewards of one name are the same row.
    index="attempt_key, name, source, ifnull(call, x''), choice",
)
USES = Table(
    "uses",
    ("attempt_key", "call", "choice", "step", "credit", "advantage", "weight", "dropped"),
    ("attempt_key", "call", "choice", "step"),
)

TABLES = (ATTEMPT_KEYS, PIECES, RUNS, ROLLOUTS, ATTEMPTS, CALLS, CHOICES, OUTCOMES, REWARDS, USES)
"""In the order of writing: what others refer to comes first."""


@cache
def insertion(table: Table, rows: int) -> str:
    """The statement that writes `rows` rows at once.

    Many rows in one statement, because sqlite3 gives up the interpreter lock once per statement: row by row,
    a busy event loop would make the writer wait for the lock at every row.
    """
    values = ["?"] * len(table.columns)
    if table.values != table.columns:
        values[0] = "(SELECT seq FROM attempt_keys WHERE rollout = ? AND attempt = ?)"
    row = f"({', '.join(values)})"
    insert = f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES {', '.join([row] * rows)}"
    if table.again == "fail":
        return insert
    conflict = f"ON CONFLICT ({table.index or ', '.join(table.key)})"
    if table.again == "keep":
        return f"{insert} {conflict} DO NOTHING"
    changes = ", ".join(f"{column} = excluded.{column}" for column in table.columns if column not in table.key)
    return f"{insert} {conflict} DO UPDATE SET {changes}"


# Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
# writing gets slower as the file grows; so they stand in one small index, and the tables with many rows are
# keyed by the number of the attempt, which only grows.
_VERSION_1 = """
CREATE TABLE attempt_keys (  -- a number for each attempt, by which the other tables refer to it
    seq INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    UNIQUE (rollout, attempt)
);
CREATE TABLE pieces (  -- messages, tool schemas and blocks of prompt tokens
    seq INTEGER PRIMARY KEY,
    data NOT NULL  -- JSON text, or int32 tokens
);
CREATE TABLE runs (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    started REAL NOT NULL,
    config TEXT NOT NULL,
    resumed_step INTEGER,
    UNIQUE (id, incarnation)
);
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    grp TEXT NOT NULL,
    task TEXT NOT NULL,
    mode TEXT NOT NULL,
    step INTEGER NOT NULL,
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    counted_attempt INTEGER,
    ending TEXT
);
CREATE INDEX rollouts_of_step ON rollouts (run, step);
CREATE INDEX rollouts_of_group ON rollouts (grp);
CREATE INDEX rollouts_in_state ON rollouts (state);
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    worker TEXT NOT NULL,
    started REAL NOT NULL,
    ended REAL,
    ending TEXT,
    result TEXT NOT NULL,
    error TEXT,
    UNIQUE (attempt_key)
);
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    policy TEXT NOT NULL,
    version INTEGER,
    request TEXT NOT NULL,  -- lists of objects (messages, tools) are null here
    request_lists TEXT NOT NULL,  -- the length of each such list
    request_pieces BLOB NOT NULL,  -- the int64 numbers of their items in pieces
    n_choices INTEGER NOT NULL,
    started REAL NOT NULL,
    ended REAL NOT NULL,
    api TEXT NOT NULL,
    agent TEXT,
    parent_span TEXT,
    prompt_blocks BLOB,  -- the int64 numbers of full blocks of prompt tokens in pieces; NULL: no ids
    prompt_tail BLOB,  -- the int32 tokens after them
    requested TEXT NOT NULL,
    effective TEXT NOT NULL,
    prefix_broken INTEGER NOT NULL,
    prefilled INTEGER NOT NULL,
    reused INTEGER NOT NULL,
    late INTEGER NOT NULL,
    retry_of TEXT,
    UNIQUE (attempt_key, id)
);
CREATE TABLE choices (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    position INTEGER NOT NULL,  -- 0 ... n_choices - 1 of its call
    choice INTEGER NOT NULL,
    message TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    response_ids BLOB,  -- int32
    logprobs BLOB,  -- float32
    mask BLOB,  -- the number of unused bits, then packed bits
    parse_error TEXT,
    UNIQUE (attempt_key, call, position)
);
CREATE TABLE outcomes (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    tool TEXT NOT NULL,
    status TEXT NOT NULL,
    tool_call_id TEXT,
    arguments TEXT NOT NULL,
    result TEXT NOT NULL,
    error TEXT,
    agent TEXT,
    span TEXT,
    parent_span TEXT,
    started REAL,
    ended REAL,
    UNIQUE (attempt_key, id)
);
CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    source TEXT NOT NULL,
    call TEXT,
    choice INTEGER NOT NULL
);
CREATE UNIQUE INDEX rewards_key ON rewards (attempt_key, name, source, ifnull(call, x''), choice);
CREATE TABLE uses (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    choice INTEGER NOT NULL,
    step INTEGER NOT NULL,
    credit REAL,
    advantage REAL,
    weight REAL NOT NULL,
    dropped TEXT,
    UNIQUE (attempt_key, call, choice)
);
"""

_VERSION_2 = """
ALTER TABLE calls ADD COLUMN state TEXT;  -- NULL: nobody told it
"""

_VERSION_3 = """
CREATE TABLE uses_by_step (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    choice INTEGER NOT NULL,
    step INTEGER NOT NULL,
    credit REAL,
    advantage REAL,
    weight REAL NOT NULL,
    dropped TEXT,
    UNIQUE (attempt_key, call, choice, step)
);
INSERT INTO uses_by_step SELECT seq, attempt_key, call, choice, step, credit, advantage, weight, dropped FROM uses;
DROP TABLE uses;
ALTER TABLE uses_by_step RENAME TO uses;
"""

MIGRATIONS: tuple[str, ...] = (_VERSION_1, _VERSION_2, _VERSION_3)
"""SQL scripts; number i brings a file from version i to i + 1. Never change one that was released."""


def migrate(connection: sqlite3.Connection, migrations: Sequence[str], where: str) -> None:
    """Bring the file up to date, one transaction per version; `where` names it in errors.

    Raises StoreError if the file is newer than `migrations`, or is not agl's; sqlite3.Error if a script fails
    (the file then stays at the version before that script).
    """
    for number in range(version_of(connection, migrations, where), len(migrations)):
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE;{migrations[number]};"
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number + 1}; COMMIT;"
            )
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def version_of(connection: sqlite3.Connection, migrations: Sequence[str], where: str) -> int:
    """The schema version of the file: 0 if it is empty. StoreError if it cannot be a store of this agl."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (tables or application):
        raise StoreError(f"{where} is another program's SQLite database, not a store of agl. Choose another path.")
    if version > len(migrations):
        raise StoreError(
            f"{where} has schema version {version}, and this agl knows versions up to {len(migrations)}. "
            f"Use the agl that wrote it, or a newer one."
        )
    return int(version)
