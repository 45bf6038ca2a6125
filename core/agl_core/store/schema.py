"""The schema of the SQLite store's file."""

from __future__ import annotations

import sqlite3

from agl_core.errors import StoreError

APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that another program's database is never written to."""
VERSION = 10
"""Grows with each change of the tables, of a record or of a default: a file of another version is refused."""

# Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
# writing gets slower as the file grows; so they stand in one small index, and the tables with many rows are
# keyed by the number of the attempt, which only grows. A `body` is the rest of the record, as JSON.
_SCHEMA = """
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
    restart INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (id, restart)
);
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run TEXT NOT NULL,
    "group" TEXT NOT NULL,
    mode TEXT NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX rollouts_of_step ON rollouts (run, step);
CREATE INDEX rollouts_of_group ON rollouts ("group");
CREATE INDEX rollouts_in_state ON rollouts (state);
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL UNIQUE,
    ended REAL,
    body TEXT NOT NULL
);
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    counted_trace BLOB,  -- the trace id of a call that counts
    pieces BLOB NOT NULL,  -- int64 numbers: the items of the request's lists, then full blocks of the prompt
    arrays BLOB NOT NULL,  -- of the choices, and what is left of the prompt; the body says where each begins
    body TEXT NOT NULL,
    UNIQUE (attempt_key, id)
);
CREATE INDEX calls_trace ON calls (counted_trace) WHERE counted_trace IS NOT NULL;
CREATE TABLE tool_results (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    source TEXT NOT NULL,
    id TEXT NOT NULL,
    tool_call_id TEXT,  -- JSON, as the two after it
    agent TEXT,
    parent_span TEXT,
    body TEXT NOT NULL,
    UNIQUE (attempt_key, source, id)
);
CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    name TEXT NOT NULL,
    source TEXT NOT NULL,
    call TEXT,
    choice INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE UNIQUE INDEX rewards_key ON rewards (attempt_key, name, source, ifnull(call, x''), choice);
CREATE TABLE training_records (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    choice INTEGER NOT NULL,
    step INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (attempt_key, call, choice, step)
);
CREATE TABLE feedback (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (attempt_key, id)
);
CREATE TABLE erased (  -- ids of rollouts that were removed, and must not come back
    id TEXT PRIMARY KEY,
    time REAL NOT NULL
) WITHOUT ROWID;
"""


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file, all or none."""
    try:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA}; PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {VERSION}; COMMIT"
        )
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def is_empty(connection: sqlite3.Connection, path: str) -> bool:
    """Whether the file has no tables yet. StoreError if it is not a store of this agl."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not (version or application or tables):
        return True
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is another program's SQLite database, not a store of agl. Choose another path.")
    if version != VERSION:
        raise StoreError(
            f"The store {path} has schema version {version}, which this agl cannot read (it reads {VERSION}): "
            f"start a new run."
        )
    return False
