"""Removing rollouts for good, with everything that was recorded of them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence

import numpy as np
import orjson

from agl_core.store.connections import transaction
from agl_core.store.pieces import NUMBERS
from agl_core.store.tables import RECORDS
from agl_core.types import Mode, RolloutState

_OF_ATTEMPTS = (*(table.name for table in RECORDS if table.of_attempts), "choices")
_REFERENCES = "SELECT request_pieces, prompt_blocks FROM calls"


def erase_rollouts(connection: sqlite3.Connection, ids: Sequence[str], first_new_piece: int) -> int:
    """Remove these rollouts and overwrite what they took; returns how many there were. All or nothing.

    Of the pieces that their calls refer to, those go that no other call has. Pieces from `first_new_piece` on stay: a
    call that is not written yet may refer to them.
    """
    connection.execute("PRAGMA secure_delete = ON")
    try:
        with transaction(connection):
            return _erase(connection, ids, first_new_piece)
    finally:
        connection.execute("PRAGMA secure_delete = OFF")


def _erase(connection: sqlite3.Connection, ids: Sequence[str], first_new_piece: int) -> int:
    asked = orjson.dumps(list(ids)).decode()
    connection.execute(
        "INSERT OR IGNORE INTO erased (id, time) SELECT value, ? FROM json_each(?)", (time.time(), asked)
    )
    going = "SELECT seq FROM attempt_keys WHERE rollout IN (SELECT value FROM json_each(?))"
    pieces = _pieces(connection.execute(f"{_REFERENCES} WHERE attempt_key IN ({going})", (asked,)))
    for table in _OF_ATTEMPTS:
        connection.execute(f"DELETE FROM {table} WHERE attempt_key IN ({going})", (asked,))
    connection.execute("DELETE FROM attempt_keys WHERE rollout IN (SELECT value FROM json_each(?))", (asked,))
    removed = connection.execute("DELETE FROM rollouts WHERE id IN (SELECT value FROM json_each(?))", (asked,)).rowcount
    if pieces:
        pieces -= _pieces(connection.execute(_REFERENCES))
    unused = ((number,) for number in pieces if number < first_new_piece)
    connection.executemany("DELETE FROM pieces WHERE seq = ?", unused)
    return removed


def _pieces(references: Iterable[tuple[bytes, bytes | None]]) -> set[int]:
    """The numbers of all of these: of every call of a store in the end, so not one by one."""
    columns = b"".join(column for row in references for column in row if column is not None)
    return set(np.unique(np.frombuffer(columns, dtype=NUMBERS)).tolist())


def erased(connection: sqlite3.Connection, ids: Iterable[str]) -> set[str]:
    """Those of these ids that were erased."""
    asked = orjson.dumps(list(ids)).decode()
    rows = connection.execute("SELECT id FROM erased WHERE id IN (SELECT value FROM json_each(?))", (asked,))
    return {id for (id,) in rows}


def ended_before(connection: sqlite3.Connection, mode: Mode, moment: float) -> list[str]:
    """The rollouts of this mode that are done, and whose last attempt ended before this moment."""
    rows = connection.execute(
        "SELECT rollouts.id FROM rollouts JOIN attempt_keys ON attempt_keys.rollout = rollouts.id "
        "JOIN attempts ON attempts.attempt_key = attempt_keys.seq WHERE rollouts.mode = ? AND rollouts.state = ? "
        "GROUP BY rollouts.id HAVING max(attempts.ended) < ? ORDER BY rollouts.seq",
        (mode.value, RolloutState.DONE.value, moment),
    )
    return [id for (id,) in rows]
