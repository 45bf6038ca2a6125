"""What the store is asked, and what is removed from it: each function runs in one transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.errors import StoreRefusedError
from agl_core.store.codec import NUMBERS, Data, decode, decode_calls, numbers_in
from agl_core.store.connections import transaction
from agl_core.store.interface import Wanted
from agl_core.store.tables import ATTEMPTS, CALLS, CHOICES, RECORDS, ROLLOUTS, RUNS, Table
from agl_core.types import Attempt, AttemptKey, Call, Json, Mode, Rollout, RolloutState, Run
from agl_core.types.forms import dump_json, load_json

Kept = TypeVar("Kept")

_PREFIX_MATCHES_SHOWN = 5
_OF_ATTEMPTS = (*(table.name for table in RECORDS if table.of_attempts), "choices")
_REFERENCES = "SELECT request_pieces, prompt_blocks FROM calls"
_OLD = "attempt_key IN temp.old AND NOT pruned"


def runs(connection: sqlite3.Connection) -> list[Run]:
    """All, oldest first."""
    return decode(RUNS, connection.execute(f"{_select(RUNS)} ORDER BY seq"))


def rollouts(connection: sqlite3.Connection, wanted: Wanted) -> list[Rollout]:
    """Those that match, oldest first."""
    limit, newest, after = wanted.get("limit"), wanted.get("newest"), wanted.get("after")
    equal = {
        name: value for name, value in wanted.items() if value is not None and name not in ("limit", "newest", "after")
    }
    conditions, values = [f'"{name}" = ?' for name in equal], list(equal.values())
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


def erase_rollouts(connection: sqlite3.Connection, first_new_piece: int, ids: Sequence[str]) -> int:
    """Remove these rollouts and overwrite what they took; returns how many there were. All or nothing.

    Of the pieces that their calls refer to, those go that no other call has. Pieces from `first_new_piece` on stay: a
    call that is not written yet may refer to them.
    """
    asked = (orjson.dumps(list(ids)).decode(),)
    their_ids = "(SELECT value FROM json_each(?))"
    their_attempts = f"attempt_key IN (SELECT seq FROM attempt_keys WHERE rollout IN {their_ids})"
    connection.execute("PRAGMA secure_delete = ON")
    try:
        with transaction(connection):
            remembered = "INSERT OR IGNORE INTO erased (time, id) SELECT ?, value FROM json_each(?)"
            connection.execute(remembered, (time.time(), *asked))
            pieces = _referred_to(connection.execute(f"{_REFERENCES} WHERE {their_attempts}", asked))
            for table in _OF_ATTEMPTS:
                connection.execute(f"DELETE FROM {table} WHERE {their_attempts}", asked)
            connection.execute(f"DELETE FROM attempt_keys WHERE rollout IN {their_ids}", asked)
            removed = connection.execute(f"DELETE FROM rollouts WHERE id IN {their_ids}", asked).rowcount
            _drop_unused(connection, pieces[pieces < first_new_piece])
            return removed
    finally:
        connection.execute("PRAGMA secure_delete = OFF")


def _drop_unused(connection: sqlite3.Connection, pieces: NDArray[np.int64]) -> None:
    """Remove those of these pieces that no call refers to."""
    if len(pieces):
        pieces = np.setdiff1d(pieces, _referred_to(connection.execute(_REFERENCES)), assume_unique=True)
    connection.executemany("DELETE FROM pieces WHERE seq = ?", ((number,) for number in pieces.tolist()))


def _referred_to(references: Iterable[tuple[bytes, bytes | None]]) -> NDArray[np.int64]:
    """The numbers of all of these: of every call of a store in the end, so not one by one."""
    columns = b"".join(column for row in references for column in row if column is not None)
    return np.unique(np.frombuffer(columns, dtype=NUMBERS))


def prune_calls(connection: sqlite3.Connection, up_to: int) -> int:
    """Take texts and tokens out of the calls of the steps up to `up_to`; returns how many calls had any.

    All in one transaction. Of each call there remain who made it, when, by which policy, how it ended, and which tools
    it asked for. Rollouts, tool results, rewards and training records stay as they are. Rollouts that were opened from
    outside are kept whole: those who opened them remove them. No writer may be there whose `Pieces` remember what this
    removes.
    """
    connection.create_function("pruned_message", 1, _pruned_message, deterministic=True)
    with transaction(connection):
        connection.execute(
            "CREATE TEMP TABLE old AS SELECT attempt_keys.seq FROM rollouts "
            "JOIN attempt_keys ON attempt_keys.rollout = rollouts.id "
            "WHERE rollouts.step <= ? AND rollouts.state = ? AND rollouts.mode <> ?",
            (up_to, RolloutState.DONE.value, Mode.USE.value),
        )
        connection.execute(
            "UPDATE choices SET message = pruned_message(message), response_ids = NULL, logprobs = NULL, mask = NULL "
            f"WHERE (attempt_key, call) IN (SELECT attempt_key, id FROM calls WHERE {_OLD})"
        )
        pruned = connection.execute(
            "UPDATE calls SET request = '{}', request_lists = '{}', request_pieces = x'', prompt_blocks = NULL, "
            f"prompt_tail = NULL, state = NULL, pruned = 1 WHERE {_OLD}"
        ).rowcount
        every = (number for (number,) in connection.execute("SELECT seq FROM pieces"))
        _drop_unused(connection, np.fromiter(every, dtype=NUMBERS))
        connection.execute("DROP TABLE temp.old")
    return pruned


def _pruned_message(text: str) -> str:
    """A reply without its texts: tool results are joined with it by the ids of its tool calls."""
    message = load_json(text)
    calls = message.get("tool_calls")
    kept = [_pruned_tool_call(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return dump_json({"role": "assistant", "content": None, **({"tool_calls": kept} if kept else {})})


def _pruned_tool_call(tool_call: Mapping[str, Json]) -> dict[str, Json]:
    function = tool_call.get("function", tool_call.get("custom"))
    name = function.get("name") if isinstance(function, Mapping) else None
    return {"id": tool_call.get("id"), "type": "function", "function": {"name": name, "arguments": "{}"}}


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
