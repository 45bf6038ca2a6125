"""Removing what was recorded: rollouts for good, or only the texts and tokens of old calls."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from agl_core.store.connections import transaction
from agl_core.store.pieces import NUMBERS
from agl_core.store.tables import RECORDS
from agl_core.types import Json, Mode, RolloutState
from agl_core.types.forms import dump_json, load_json

_OF_ATTEMPTS = (*(table.name for table in RECORDS if table.of_attempts), "choices")
_REFERENCES = "SELECT request_pieces, prompt_blocks FROM calls"
_OLD = "attempt_key IN temp.old AND NOT pruned"


def erase_rollouts(connection: sqlite3.Connection, first_new_piece: int, ids: Sequence[str]) -> int:
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
    _drop_unused(connection, pieces[pieces < first_new_piece])
    return removed


def _drop_unused(connection: sqlite3.Connection, pieces: NDArray[np.int64]) -> None:
    """Remove those of these pieces that no call refers to."""
    if len(pieces):
        pieces = np.setdiff1d(pieces, _pieces(connection.execute(_REFERENCES)), assume_unique=True)
    connection.executemany("DELETE FROM pieces WHERE seq = ?", ((number,) for number in pieces.tolist()))


def _pieces(references: Iterable[tuple[bytes, bytes | None]]) -> NDArray[np.int64]:
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
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    kept = [_pruned_tool_call(each) for each in calls if isinstance(each, Mapping)] if isinstance(calls, list) else []
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
