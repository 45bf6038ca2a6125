"""Execution match: two SQL queries are the same if they give the same rows."""

from __future__ import annotations

import asyncio
import marshal
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Episode
from agl_rewards.evaluators import expected_answer

Row: TypeAlias = tuple[Any, ...]

_PROGRAM = Path(__file__).with_name("sql_process.py")


@agl_core.reward_rule
async def sql_match(
    episode: Episode,
    *,
    field: Annotated[str, Field(description="The key of the task's metadata that holds the query.")] = "result",
    database: Annotated[
        Path, Field(description="The SQLite file, relative to the configuration, with {fields} of the metadata.")
    ] = Path("{database}"),
    timeout: Annotated[float, Field(gt=0, le=86_400, description="Seconds that each query may take.")] = 5.0,
    max_rows: Annotated[int, Field(ge=1, description="Rows that each query may give.")] = 10_000,
    max_bytes: Annotated[int, Field(ge=1, description="Bytes that the rows of each query may hold.")] = 10_000_000,
) -> float:
    """1 if the SQL query that the agent returned gives the same rows as the expected one (Spider, arXiv 1809.08887).

        [rewards.sql_match]
        field = "sql"                                # the task's metadata: the expected query
        database = "data/{database}.sqlite"          # the file, with fields of the metadata

    Both run on the SQLite file, read-only, each for at most `timeout` seconds, `max_rows` rows and `max_bytes` bytes of
    values. A query of the agent that fails, writes, or exceeds a limit is wrong. Each has its own process, so the time
    limit holds for everything that SQLite does, even within a single call of a function. Rows are compared as a
    multiset, or in order if the expected query orders them; columns by place, not name; numbers to nine digits.
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


def run_query(database: Path, query: str, timeout: float, max_rows: int, max_bytes: int = 10_000_000) -> list[Row]:
    """The rows of one query on an SQLite file that is not changed.

    The query runs in its own process, which ends when its time is up, also in the middle of a function. sqlite3.Error
    if it is not a single query that reads, takes longer than `timeout` seconds, or gives more than `max_rows` rows or
    values of more than `max_bytes` bytes; FileNotFoundError if the file does not exist. In addition to these bytes, at
    most one row of ten million bytes is held in memory.
    """
    if not database.is_file():
        raise FileNotFoundError(f"there is no file {database.absolute()}")
    request = (f"{database.absolute().as_uri()}?mode=ro", query, timeout, max_rows, max_bytes)
    process = subprocess.run(
        [sys.executable, "-I", "-S", str(_PROGRAM)],
        input=marshal.dumps(request),
        capture_output=True,
        start_new_session=True,  # Ctrl-C is meant for the run; it would make the query fail.
        check=False,
    )
    if process.returncode == -signal.SIGALRM:
        raise sqlite3.OperationalError(f"interrupted: it took longer than {timeout:g} seconds")
    if process.returncode != 0:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise sqlite3.OperationalError(f"its process ended with code {process.returncode} ({last})")
    kind, answer = marshal.loads(process.stdout)
    if kind != "rows":
        raise getattr(sqlite3, kind)(answer)
    rows: list[Row] = answer
    return rows


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
    """Whether the query itself (not a part in parentheses) has ORDER BY."""
    query = re.sub(r"'[^']*'", "''", query)
    inner = 1
    while inner:
        query, inner = re.subn(r"\([^()]*\)", " ", query)
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None
