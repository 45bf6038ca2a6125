"""The agent's access to a database: read its schema, and run one query on it, read-only and bounded."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_ROWS = 1000
LONGEST_VALUE = 10_000
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_INSTRUCTIONS, _PARTS = 10_000, 200
"""SQLite asks after so many instructions whether to go on; it may, so many times: about 0.1 seconds."""


@dataclass(frozen=True)
class Outcome:
    """The rows of a query, or why there are none."""

    rows: tuple[tuple[Any, ...], ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        """The result as a model sees it: how many rows there are, and the first."""
        if self.error is not None:
            return f"error: {self.error}"
        if not self.rows:
            return "no rows"
        first = " , ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in self.rows[0])
        return f"{len(self.rows)} rows, first {first[:200]}"


def run(connection: sqlite3.Connection, query: str) -> Outcome:
    """Run one query; whatever is wrong with it is an outcome."""
    asked = 0

    def enough() -> bool:
        nonlocal asked
        asked += 1
        return asked > _PARTS

    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
    connection.set_progress_handler(enough, _INSTRUCTIONS)
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            return Outcome(error="not a query")
        rows = cursor.fetchmany(MOST_ROWS + 1)
    except (sqlite3.Error, ValueError) as error:
        return Outcome(error=str(error))
    finally:
        connection.set_progress_handler(None, 0)
        connection.set_authorizer(None)
    return Outcome(tuple(rows)) if len(rows) <= MOST_ROWS else Outcome(error=f"more than {MOST_ROWS} rows")


@contextmanager
def reading(file: Path) -> Iterator[sqlite3.Connection]:
    """A connection that cannot change the file."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        yield connection


def describe(connection: sqlite3.Connection) -> str:
    """The schema, a line for each table: its columns, and references whose two ends have different names.

    >>> connection = sqlite3.connect(":memory:")
    >>> _ = connection.execute("CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT)")
    >>> _ = connection.execute("CREATE TABLE song (title TEXT, by INTEGER REFERENCES singer (id))")
    >>> print(describe(connection))
    table singer : id name
    table song : title by ( by = singer.id )
    """
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    lines = []
    for (table,) in tables.fetchall():
        columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
        references = connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (table,))
        for here, there, column in references.fetchall():
            if here != column:
                columns.append(f"( {here} = {there}.{column} )")
        lines.append(f"table {table} : {' '.join(columns)}")
    return "\n".join(lines)
