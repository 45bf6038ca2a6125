"""Execution match: two SQL queries are the same if they give the same rows."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.processes.sandbox import SandboxLimitError, run_sandboxed
from agl_core.types import Episode
from agl_rewards.evaluators import expected_answer

Row: TypeAlias = tuple[Any, ...]
Columns: TypeAlias = Set[tuple[str, str]]
"""The tables and columns that a query names; a column is empty where only rows are counted."""

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_MAX_ROWS = 100_000
"""Rows of one query: answers have far fewer."""
_PARTS = 3
"""Each row of a table is in one of so many parts; guesses are tried without each part, and without all of them."""
_MAX_COPIED = 100_000_000
"""Bytes of a file that is copied into memory to hide rows; in larger ones views hide them, which have no `rowid`."""
_QUOTED = """printf('"%w"', name)"""
_TABLES = f"""
    SELECT {_QUOTED}, (SELECT group_concat({_QUOTED}) FROM pragma_table_info(list.name) WHERE pk AND has_no_rowid)
    FROM (SELECT *, sql LIKE '%WITHOUT%ROWID%' AS has_no_rowid FROM sqlite_master WHERE type = 'table') AS list
    WHERE rootpage > 0 AND name NOT LIKE 'sqlite_%'
"""
"""Tables that are not virtual, and the columns of their keys if they have no row ids."""
_MAX_BYTES = 10_000_000
"""Bytes of one query's rows in JSON; the sandbox bounds their memory before."""


@agl_core.reward_rule
async def sql_match(
    episode: Episode,
    *,
    field: Annotated[str, Field(description="The key of the task's metadata that holds the query.")] = "result",
    database: Annotated[
        Path, Field(description="The SQLite file, relative to the configuration, with {fields} of the metadata.")
    ] = Path("{database}"),
    timeout: Annotated[float, Field(gt=0, le=86_400, description="Seconds that each query may take.")] = 5.0,
) -> float:
    """1 if the SQL query that the agent returned gives the same rows as the expected one (Spider, arXiv 1809.08887).

        [rewards.sql_match]
        field = "sql"                                # the task's metadata: the expected query
        database = "data/{database}.sqlite"          # the file, with fields of the metadata

    Both run on the SQLite file, read-only, each in a process of its own for at most `timeout` seconds, 100,000 rows and
    10 MB of JSON. A query of the agent that fails, writes, or exceeds a limit is wrong. Rows are compared as a
    multiset, or in order if the expected query orders them; columns by place, not name; numbers to nine digits.
    A query is a guess unless it is right at least once when a third of every table's rows, or all of them, are hidden
    and the expected rows change with that: `SELECT 3 FROM t LIMIT 1` does not count. Expected rows that never change
    need a column that both queries name; those that are empty, or nothing but zeros and NULL, need all tables and
    columns of the expected query.
    Relative paths, also in the metadata, start at the configuration's folder.
    """
    expected = expected_answer(episode, field)
    try:
        file = Path(*(part.format_map(episode.task.metadata) for part in database.parts))
    except KeyError as error:
        raise ConfigError(
            f"Task '{episode.task.id}' has no metadata {error} for sql_match's `database` = '{database}'. "
            f"Name the file, or a key that holds it."
        ) from None
    try:
        wanted, needed = await run_query(file, expected, timeout)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"Task '{episode.task.id}': the expected query in its metadata '{field}' fails on {file} "
            f"({type(error).__name__}: {error}). Correct it, or raise sql_match's `timeout`."
        ) from error
    if not isinstance(episode.result, str):
        return 0.0
    try:
        rows, read = await run_query(file, episode.result, timeout)
    except sqlite3.Error:
        return 0.0
    if not same_rows(rows, wanted, ordered=_is_ordered(expected)):
        return 0.0
    follows = await _follows_rows(file, episode.result, expected, wanted, timeout)
    return float(follows is not False and _is_no_guess(read, needed, wanted, is_shown=follows is True))


async def _follows_rows(file: Path, query: str, expected: str, wanted: Sequence[Row], timeout: float) -> bool | None:
    """Whether the query is right for once where the expected rows change with hidden ones; None if they never do."""
    follows, ordered = None, _is_ordered(expected)
    for hidden in range(_PARTS + 1):
        with contextlib.suppress(sqlite3.Error):
            changed, _ = await run_query(file, expected, timeout, hidden)
            # No rows of empty tables are no evidence: most queries have none there.
            if same_rows(changed, wanted, ordered=ordered) or (hidden == _PARTS and not changed):
                continue
            follows = False
            if same_rows((await run_query(file, query, timeout, hidden))[0], changed, ordered=ordered):
                return True
    return follows


async def run_query(database: Path, query: str, timeout: float, hidden: int | None = None) -> tuple[list[Row], Columns]:
    """The rows of one query on an SQLite file that is not changed, and the columns that it names.

    `hidden` is the part of every table's rows, of three, that the query does not see; 3 is all of them. The query runs
    in a sandbox, since SQLite checks an interrupt only between two instructions, and one call of `instr` or LIKE is one
    instruction that can take minutes. sqlite3.Error if it is not a single query that reads, or exceeds a limit of
    `sql_match`; FileNotFoundError if the file does not exist.
    """
    uri, files = await asyncio.to_thread(_located, database)
    try:
        kind, *answer = await run_sandboxed(
            _read, uri, query, _MAX_ROWS, hidden, seconds=timeout, reads=files, max_reply=_MAX_BYTES
        )
    except SandboxLimitError as error:
        raise sqlite3.OperationalError(f"interrupted: {error}") from error
    if kind != "rows":
        raise getattr(sqlite3, kind)(*answer)
    rows, columns = answer
    return [tuple(map(_value, row)) for row in rows], {(table, column) for table, column in columns}


def _located(database: Path) -> tuple[str, list[Path]]:
    """How SQLite opens the database, and the files that it may read for that."""
    if not database.is_file():
        raise FileNotFoundError(f"there is no file {database.absolute()}")
    beside = [database.with_name(database.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
    with database.open("rb") as file:
        is_logged = file.read(20)[18:19] == b"\2"
    # SQLite would create files beside a database in WAL mode, to lock it, unless nobody is writing to it.
    mode = "mode=ro&immutable=1" if is_logged and not beside[0].exists() else "mode=ro"
    return f"{database.absolute().as_uri()}?{mode}", [database.absolute(), *beside]


def _is_no_guess(read: Columns, needed: Columns, wanted: Sequence[Row], *, is_shown: bool) -> bool:
    """True if rows that are right can be no accident of a query that has not looked for them.

    No rows, and rows of nothing but zeros and NULL, come of many wrong queries (`SELECT 1 WHERE 0`). `is_shown`: the
    rows follow those of the tables.
    """
    columns = {column for column in needed if column[1]}
    if any(value not in (None, 0, "") for row in wanted for value in row):
        return is_shown or not needed or bool(columns & read)
    return {table for table, _ in needed} <= {table for table, _ in read} and columns <= read


def same_rows(rows: Sequence[Row], wanted: Sequence[Row], *, ordered: bool) -> bool:
    """True if two results are equal, as lists if `ordered`, else as multisets.

    >>> same_rows([(2, "b"), (1, "a")], [(1.0, "a"), (2, "b")], ordered=False)
    True
    >>> same_rows([(1,)], [(1,), (1,)], ordered=False)
    False
    """
    left, right = [_comparable(row) for row in rows], [_comparable(row) for row in wanted]
    return left == right if ordered else Counter(left) == Counter(right)


def _comparable(row: Row) -> Row:
    return tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row)


def _is_ordered(query: str) -> bool:
    """True if the query itself (not a part in parentheses) has ORDER BY."""
    query = re.sub(r"'[^']*'", "''", query)
    inner = 1
    while inner:
        query, inner = re.subn(r"\([^()]*\)", " ", query)
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None


def _read(uri: str, query: str, max_rows: int, hidden: int | None) -> list[Any]:
    """In the sandbox: "rows", the rows and the columns that the query names; or an sqlite3 error's name and text."""
    columns: set[tuple[str, str]] = set()

    def authorize(action: int, table: str | None, column: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_READ:
            columns.add(((table or "").lower(), (column or "").lower()))
        return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY

    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(closing(sqlite3.connect(uri, uri=True)))
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA temp_store = MEMORY")  # In a sandbox, no file can be written.
            if hidden is not None:
                connection = stack.enter_context(closing(_without(connection, hidden)))
            connection.set_authorizer(authorize)
            cursor = connection.execute(query)
            if cursor.description is None:
                return ["ProgrammingError", "it is not a query"]
            rows = cursor.fetchmany(max_rows + 1)
            if len(rows) > max_rows:
                return ["DataError", f"it gives more than {max_rows} rows"]
            return ["rows", [list(map(_in_json, row)) for row in rows], sorted(columns)]
    except sqlite3.Error as error:
        return [type(error).__name__, str(error)]
    except UnicodeError as error:  # Half a surrogate pair, which JSON can carry.
        return ["ProgrammingError", f"it is not a text: {error}"]


def _without(connection: sqlite3.Connection, part: int) -> sqlite3.Connection:
    """A copy in memory without this part of each table's rows; in a large file views hide them."""
    pages = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    is_copied = connection.execute(pages).fetchone()[0] <= _MAX_COPIED
    if is_copied:
        original, connection = connection, sqlite3.connect(":memory:")
        connection.text_factory = original.text_factory
        original.backup(connection)
        for (trigger,) in connection.execute(f"SELECT {_QUOTED} FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
    connection.create_function("part", -1, lambda *key: zlib.crc32(repr(key).encode()) % _PARTS, deterministic=True)
    for table, key in connection.execute(_TABLES).fetchall():
        part_of = f"abs(rowid) % {_PARTS}" if key is None else f"part({key})"
        hides = f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table} WHERE {part} NOT IN ({part_of}, {_PARTS})"
        if is_copied:
            hides = f"DELETE FROM {table} WHERE {part} IN ({part_of}, {_PARTS})"
        with contextlib.suppress(sqlite3.Error):  # It may need a function or a collation that is not here.
            connection.execute(hides)
    return connection


def _in_json(value: Any) -> Any:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def _value(in_json: Any) -> Any:
    return bytes.fromhex(in_json["blob"]) if isinstance(in_json, dict) else in_json
