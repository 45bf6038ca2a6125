"""The program of the process that runs one SQL query for `agl_rewards.sql.run_query`.

SQLite checks an interrupt or a progress handler only between two instructions, and one call of `instr` or LIKE is one
instruction that can take minutes. The query therefore has its own process, which the kernel ends by a timer, whatever
SQLite does, and also if the process that wants the rows is gone. It imports only the standard library and starts in
about 20 ms.
"""

from __future__ import annotations

import marshal
import signal
import sqlite3
import sys
from contextlib import closing
from typing import Any

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_LONGEST_VALUE = 1_000_000
"""Bytes of one text or blob; a query could make one that fills the memory in a single instruction."""
_LARGEST_ROW = 10_000_000
"""Bytes of one row, which SQLite builds as a whole before it can be read."""
_NUMBER = 8
"""The bytes that a number or NULL counts."""


def main() -> None:
    """Read the request from stdin, write the rows, or the name and text of an sqlite3 error, to stdout."""
    uri, query, timeout, max_rows, max_bytes = marshal.load(sys.stdin.buffer)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, timeout)
    answer: tuple[str, Any]
    try:
        answer = "rows", _read(uri, query, max_rows, max_bytes)
    except sqlite3.Error as error:
        answer = type(error).__name__, str(error)
    except UnicodeError as error:  # Half a surrogate pair, which JSON can carry.
        answer = "ProgrammingError", f"it is not a text: {error}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    marshal.dump(answer, sys.stdout.buffer)


def _read(uri: str, query: str, max_rows: int, max_bytes: int) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
        if columns := _columns(connection, query):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(_LONGEST_VALUE, _LARGEST_ROW // columns))
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("it is not a query")
        return _rows(cursor, max_rows, max_bytes)


def _columns(connection: sqlite3.Connection, query: str) -> int:
    """The number of values in a row of the query, which only its program shows before the first row is made."""
    if not query.strip():
        return 0
    program = connection.execute(f"EXPLAIN {query}")
    return max((width for _, operation, _, width, *_ in program if operation == "ResultRow"), default=0)


def _rows(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> list[tuple[Any, ...]]:
    """All rows, fetched one by one, so that the limits hold in memory too."""
    rows: list[tuple[Any, ...]] = []
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


if __name__ == "__main__":
    main()
