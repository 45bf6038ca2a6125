"""The versions of the SQLite store's file, and how an older file becomes a current one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from agl_core.errors import StoreError

APPLICATION_ID = 0x61676C00
"""Marks a file as agl's (`agl` in ASCII), so that another program's database is never written to."""


# Columns of two versions of a table.
_OF_TOOL_RESULTS = """
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
"""
_OF_USES = """
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    choice INTEGER NOT NULL,
    step INTEGER NOT NULL,
    credit REAL,
    advantage REAL,
    weight REAL NOT NULL,
    dropped TEXT,
"""

# Rollout ids are random. An index that starts with them makes every row written touch a page of its own, and
# writing gets slower as the file grows; so they stand in one small index, and the tables with many rows are
# keyed by the number of the attempt, which only grows.
_VERSION_1 = f"""
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
CREATE TABLE outcomes ({_OF_TOOL_RESULTS}    UNIQUE (attempt_key, id)
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
CREATE TABLE uses ({_OF_USES}    UNIQUE (attempt_key, call, choice)
);
"""

_VERSION_2 = """
ALTER TABLE calls ADD COLUMN state TEXT;  -- NULL: not reported
"""

_VERSION_3 = f"""
CREATE TABLE uses_by_step ({_OF_USES}    UNIQUE (attempt_key, call, choice, step)
);
INSERT INTO uses_by_step SELECT seq, attempt_key, call, choice, step, credit, advantage, weight, dropped FROM uses;
DROP TABLE uses;
ALTER TABLE uses_by_step RENAME TO uses;
"""

# Before, an id began with its source: `langchain:…`, `otel:…`; one without a colon was of the agent's own code.
_VERSION_4 = f"""
CREATE TABLE tool_results ({_OF_TOOL_RESULTS}    source TEXT NOT NULL,
    adapter TEXT,
    UNIQUE (attempt_key, source, id)
);
INSERT INTO tool_results SELECT
    seq, attempt_key, id, tool, status, tool_call_id, arguments, result, error, agent, span, parent_span,
    started, ended,
    CASE WHEN id LIKE 'otel:%' THEN 'span' ELSE 'adapter' END,
    CASE WHEN instr(id, ':') THEN substr(id, 1, instr(id, ':') - 1) END
FROM outcomes;
DROP TABLE outcomes;
ALTER TABLE runs RENAME COLUMN incarnation TO restart;
ALTER TABLE rollouts RENAME COLUMN incarnation TO restart;
ALTER TABLE uses RENAME TO training_records;
UPDATE rewards SET source = 'tool_results' WHERE source = 'tool_outcomes';
ALTER TABLE rollouts ADD COLUMN position INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN pruned INTEGER NOT NULL DEFAULT 0;
"""

_VERSION_5 = """
ALTER TABLE tool_results ADD COLUMN status_rule TEXT;  -- NULL: recorded before rules had names
"""

_VERSION_6 = """
ALTER TABLE calls ADD COLUMN undelivered INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN stamped INTEGER NOT NULL DEFAULT 1;  -- 1 where it was not recorded
ALTER TABLE attempts ADD COLUMN passed_through TEXT;  -- NULL: nothing was
"""

_VERSION_7 = """
CREATE TABLE feedback (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    received REAL NOT NULL,
    rewards TEXT NOT NULL,
    call TEXT,
    correction TEXT NOT NULL,
    note TEXT,
    UNIQUE (attempt_key, id)
);
CREATE TABLE erased (  -- ids of rollouts that were removed, and must not come back
    id TEXT PRIMARY KEY,
    time REAL NOT NULL
) WITHOUT ROWID;
"""

_VERSION_8 = """
ALTER TABLE calls ADD COLUMN trace TEXT;  -- NULL: not known
CREATE INDEX calls_trace ON calls (trace) WHERE trace IS NOT NULL;
"""

_VERSION_9 = """
ALTER TABLE attempts ADD COLUMN bypassed TEXT;  -- NULL: none was noticed
"""

MIGRATIONS: tuple[str, ...] = (
    *(_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4, _VERSION_5, _VERSION_6, _VERSION_7, _VERSION_8, _VERSION_9),
)
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
