"""Execution match: two SQL queries are the same if they give the same rows."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Episode
from agl_rewards.evaluators import expected_answer

Row: TypeAlias = tuple[Any, ...]

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_STEPS_BETWEEN_CHECKS = 1000
"""Instructions of SQLite's virtual machine (some microseconds) after which the time is looked at."""
_LONGEST_VALUE = 1_000_000
"""Bytes of one text or blob; a query could make one that fills the memory in a single instruction."""
_LARGEST_ROW = 10_000_000
"""Bytes of one row, which SQLite makes whole before anyone can look at it."""
_NUMBER = 8
"""Bytes that a number, or nothing, counts."""


@agl_core.reward_rule
async def sql_match(
    episode: Episode,
    *,
    field: Annotated[str, Field(description="The key of the task's metadata that holds the query.")] = "result",
    database: Annotated[
        Path, Field(description="The SQLite file, relative to the configuration, with {fields} of the metadata.")
    ] = Path("{database}"),
    timeout: Annotated[float, Field(gt=0, description="Seconds that each query may take.")] = 5.0,
    max_rows: Annotated[int, Field(ge=1, description="Rows that each query may give.")] = 10_000,
    max_bytes: Annotated[int, Field(ge=1, description="Bytes that the rows of each query may hold.")] = 10_000_000,
) -> float:
    """1 if the SQL query that the agent returned gives the same rows as the expected one (Spider, arXiv 1809.08887).

        [rewards.sql_match]
        field = "sql"                                # the task's metadata: the expected query
        database = "data/{database}.sqlite"          # the file, with fields of the metadata

    Both run on the SQLite file, read-only, each for `timeout` seconds, `max_rows` rows and `max_bytes` bytes of values
    at most; a query of the agent's that fails, writes, or goes beyond is wrong. Rows are compared as a multiset, in
    order where the expected query orders them; columns by place, not name; numbers to nine digits. A relative path,
    also one in the metadata, starts at the configuration's folder.
    """
    expected = expected_answer(episode, field)
    try:
        file = Path(*(part.format_map(episode.task.metadata) for part in database.parts))
    except KeyError as error:
        raise ConfigError(
            f"Task '{episode.task.id}' has no metadata {error} for sql_match's `database` = '{database}'. "
            f"Name the file, or a key that holds it."
        ) from None
    limits = (timeout, max_rows, max_bytes)
    try:
        wanted = await asyncio.to_thread(run_query, file, expected, *limits)
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"Task '{episode.task.id}': the expected query in its metadata '{field}' fails on {file} "
            f"({type(error).__name__}: {error}). Correct it, or raise sql_match's `timeout`, `max_rows` or `max_bytes`."
        ) from error
    if not isinstance(episode.result, str):
        return 0.0
    try:
        found = await asyncio.to_thread(run_query, file, episode.result, *limits)
    except sqlite3.Error:
        return 0.0
    return float(same_rows(found, wanted, ordered=_is_ordered(expected)))


def run_query(database: Path, query: str, timeout: float, max_rows: int, max_bytes: int = _LARGEST_ROW) -> list[Row]:
    """The rows of one query on an SQLite file that is not changed.

    sqlite3.Error if it is no single query that reads, takes longer than `timeout` seconds, gives more than
    `max_rows` rows or values of more than `max_bytes` bytes; FileNotFoundError if there is no such file. Beside these
    bytes, at most one row of ten million is held.
    """
    if not database.is_file():
        raise FileNotFoundError(f"there is no file {database.absolute()}")
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        deadline = time.monotonic() + timeout
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS_BETWEEN_CHECKS)
        if columns := _columns(connection, query):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_LONGEST_VALUE, _LARGEST_ROW // columns))
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("it is not a query")
        return _rows(cursor, max_rows, max_bytes)


def _columns(connection: sqlite3.Connection, query: str) -> int:
    """How many values a row of the query has, which only its program tells before the first row is made."""
    if not query.strip():
        return 0
    program = connection.execute(f"EXPLAIN {query}")
    return max((width for _, operation, _, width, *_ in program if operation == "ResultRow"), default=0)


def _rows(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> list[Row]:
    """All rows, fetched one by one, so that no more is held than is allowed."""
    rows: list[Row] = []
    size = 0
    for row in cursor:
        if len(rows) == max_rows:
            raise sqlite3.DataError(f"it gives more than {max_rows} rows")
        size += sum(map(_size, row))
        if size > max_bytes:
            raise sqlite3.DataError(f"its rows hold more than {max_bytes} bytes")
        rows.append(row)
    return rows


def _size(value: Any) -> int:
    return len(value.encode() if isinstance(value, str) else value) if isinstance(value, str | bytes) else _NUMBER


def same_rows(found: Sequence[Row], wanted: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results are equal, as lists if `ordered`, else as multisets.

    >>> same_rows([(2, "b"), (1, "a")], [(1.0, "a"), (2, "b")], ordered=False)
    True
    >>> same_rows([(1,)], [(1,), (1,)], ordered=False)
    False
    """
    left, right = [_comparable(row) for row in found], [_comparable(row) for row in wanted]
    return left == right if ordered else Counter(left) == Counter(right)


def _comparable(row: Row) -> Row:
    return tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in row)


def _is_ordered(query: str) -> bool:
    """Whether the query itself (not a part in parentheses) says ORDER BY."""
    query = re.sub(r"'[^']*'", "''", query)
    inner = 1
    while inner:
        query, inner = re.subn(r"\([^()]*\)", " ", query)
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None
