"""The schema of the SQLite store's file."""

from __future__ import annotations

import sqlite3

from agl_core.errors import StoreError

APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that another program's database is never written to."""
VERSION = 10
"""Grows with each change of the schema: a file of another version is refused."""

# Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
# writing gets slower as the file grows; so they stand in one small index, and the tables with many rows are
# keyed by the number of the attempt, which only grows.
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
    started REAL NOT NULL,
    config TEXT NOT NULL,
    resumed_step INTEGER,
    UNIQUE (id, restart)
);
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run TEXT NOT NULL,
    restart INTEGER NOT NULL,
    grp TEXT NOT NULL,
    task TEXT NOT NULL,
    mode TEXT NOT NULL,
    step INTEGER NOT NULL,
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    counted_attempt INTEGER,
    ending TEXT,
    position INTEGER NOT NULL
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
    passed_through TEXT,
    bypassed TEXT,
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
    state TEXT,  -- NULL: not reported
    pruned INTEGER NOT NULL,
    undelivered INTEGER NOT NULL,
    stamped INTEGER NOT NULL,
    trace TEXT,  -- NULL: not known
    UNIQUE (attempt_key, id)
);
CREATE INDEX calls_trace ON calls (trace) WHERE trace IS NOT NULL;
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
CREATE TABLE tool_results (
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
    source TEXT NOT NULL,
    adapter TEXT,
    status_rule TEXT,
    UNIQUE (attempt_key, source, id)
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
CREATE TABLE training_records (
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
CREATE TABLE annotations (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    received REAL NOT NULL,
    said TEXT NOT NULL,
    call TEXT,
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
