"""The questions to the store: each function runs in one read transaction and returns records."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, TypeVar

import orjson

from agl_core.errors import StoreRefusedError
from agl_core.store.codec import decode, decode_calls
from agl_core.store.pieces import Data, numbers_in
from agl_core.store.tables import ATTEMPTS, CALLS, CHOICES, ROLLOUTS, RUNS, Table
from agl_core.types import Attempt, AttemptKey, Call, Rollout, Run

Kept = TypeVar("Kept")

_PREFIX_MATCHES_SHOWN = 5


def runs(connection: sqlite3.Connection) -> list[Run]:
    """All, oldest first."""
    return decode(RUNS, connection.execute(f"{_select(RUNS)} ORDER BY seq"))


def rollouts(
    connection: sqlite3.Connection,
    wanted: dict[str, Any],
    limit: int | None = None,
    newest: int | None = None,
    after: str | None = None,
) -> list[Rollout]:
    """Those whose columns have the wanted values, oldest first; at most the first `limit` of the last `newest`.

    With `after`, only those that were made after that one.
    """
    conditions = [f"{column} = ?" for column in wanted]
    values = list(wanted.values())
    if after is not None:
        conditions.append("seq > (SELECT seq FROM rollouts WHERE id = ?)")
        values.append(after)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    most = limit if newest is None else newest
    sql = f"{_select(ROLLOUTS)}{where} ORDER BY seq {'' if newest is None else 'DESC'} LIMIT ?"
    matching = decode(ROLLOUTS, connection.execute(sql, (*values, -1 if most is None else most)))
    return matching if newest is None else matching[::-1][:limit]


def rollout(connection: sqlite3.Connection, prefix: str, where: str) -> Rollout:
    """The only one whose id starts with `prefix`, or is `prefix`; `where` names the store in errors."""
    rows = connection.execute(
        f"{_select(ROLLOUTS)} WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?",
        (prefix, prefix + "\U0010ffff", _PREFIX_MATCHES_SHOWN),
    )
    matching = decode(ROLLOUTS, rows)
    if not matching:
        raise StoreRefusedError(
            f"No rollout in {where} has an id that starts with {prefix!r}. `agl rollouts` lists them."
        )
    if len(matching) > 1 and matching[0].id != prefix:
        more = ", …" if len(matching) == _PREFIX_MATCHES_SHOWN else ""
        raise StoreRefusedError(
            f"Several rollouts in {where} have ids that start with {prefix!r}: "
            f"{', '.join(rollout.id for rollout in matching)}{more}. Give more of the id."
        )
    return matching[0]


def attempts(connection: sqlite3.Connection, rollout_ids: Iterable[str]) -> list[Attempt]:
    """Those of these rollouts: by rollout as asked, then in order."""
    rows = connection.execute(
        "SELECT attempt_keys.rollout, attempt_keys.attempt FROM json_each(?) AS asked "
        "CROSS JOIN attempt_keys ON attempt_keys.rollout = asked.value ORDER BY asked.key, attempt_keys.attempt",
        (orjson.dumps(list(dict.fromkeys(rollout_ids))).decode(),),
    )
    keys = [AttemptKey(*row) for row in rows]
    return decode(ATTEMPTS, _of_attempts(connection, ATTEMPTS, keys, "asked.key"))


def calls(connection: sqlite3.Connection, keys: Iterable[AttemptKey]) -> list[Call]:
    """Those of these attempts: by attempt as asked, then in the order they started."""
    unique = tuple(dict.fromkeys(keys))
    rows = _of_attempts(connection, CALLS, unique, "asked.key, calls.sequence, calls.seq").fetchall()
    choices = _of_attempts(connection, CHOICES, unique, "choices.position")
    # The columns of CALLS.after; a row has one value more than the table, rollout and attempt for their number.
    references = [CALLS.columns.index(name) + 1 for name in ("request_pieces", "prompt_blocks")]
    numbers = {number for row in rows for position in references for number in numbers_in(row[position])}
    return decode_calls(rows, choices, _pieces(connection, numbers))


def traced(connection: sqlite3.Connection, trace: str) -> list[tuple[str, str]]:
    """Rollout and id of the calls of this trace that count, in the order they were recorded."""
    rows = connection.execute(
        "SELECT attempt_keys.rollout, calls.id FROM calls JOIN attempt_keys ON attempt_keys.seq = calls.attempt_key "
        "WHERE calls.trace = ? AND NOT calls.late AND NOT calls.undelivered ORDER BY calls.seq",
        (trace,),
    )
    return rows.fetchall()


def recorded(connection: sqlite3.Connection, table: Table[Kept], keys: Iterable[AttemptKey]) -> list[Kept]:
    """The table's records of these attempts, in the order they were recorded."""
    return decode(table, _of_attempts(connection, table, keys, f"{table.name}.seq"))


def next_piece(connection: sqlite3.Connection) -> int:
    """The first number that no piece has."""
    (number,) = connection.execute("SELECT ifnull(max(seq), 0) + 1 FROM pieces").fetchone()
    return int(number)


def _select(table: Table[Any]) -> str:
    return f"SELECT {', '.join(table.columns)} FROM {table.name}"


def _of_attempts(
    connection: sqlite3.Connection, table: Table[Any], keys: Iterable[AttemptKey], order: str
) -> sqlite3.Cursor:
    """One statement for any number of attempts: CROSS JOIN makes SQLite look up each of them by the index."""
    columns = ", ".join(f"{table.name}.{column}" for column in table.columns[1:])
    asked = orjson.dumps([[rollout_id, attempt] for rollout_id, attempt in dict.fromkeys(keys)]).decode()
    return connection.execute(
        f"SELECT attempt_keys.rollout, attempt_keys.attempt, {columns} FROM json_each(?) AS asked "
        f"CROSS JOIN attempt_keys ON attempt_keys.rollout = json_extract(asked.value, '$[0]') "
        f"AND attempt_keys.attempt = json_extract(asked.value, '$[1]') "
        f"CROSS JOIN {table.name} ON {table.name}.attempt_key = attempt_keys.seq ORDER BY {order}",
        (asked,),
    )


def _pieces(connection: sqlite3.Connection, numbers: set[int]) -> dict[int, Data]:
    asked = orjson.dumps(list(numbers)).decode()
    return dict(
        connection.execute(
            "SELECT pieces.seq, pieces.data FROM json_each(?) AS asked CROSS JOIN pieces ON pieces.seq = asked.value",
            (asked,),
        )
    )
