"""Taking texts and tokens out of old calls, and giving the space back."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from agl_core.store.connections import transaction
from agl_core.store.pieces import numbers_in
from agl_core.types import Json, Mode, RolloutState
from agl_core.types.forms import dump_json, load_json

_OLD = "attempt_key IN temp.old AND NOT pruned"


def prune_calls(connection: sqlite3.Connection, up_to: int) -> int:
    """Take texts and tokens out of the calls of the steps up to `up_to`; returns how many calls had any.

    All in one transaction. Of each call there remain who made it, when, by which policy, how it ended, and which tools
    it asked for. Rollouts, tool results, rewards and uses stay as they are. Sessions of real use are
    kept whole: they have a setting of their own. No writer may be there whose `Pieces` remember what this removes.
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
        connection.execute("CREATE TEMP TABLE kept (seq INTEGER PRIMARY KEY)")
        for references in connection.execute("SELECT request_pieces, prompt_blocks FROM calls WHERE NOT pruned"):
            numbers = [(number,) for column in references for number in numbers_in(column)]
            connection.executemany("INSERT OR IGNORE INTO temp.kept VALUES (?)", numbers)
        connection.execute("DELETE FROM pieces WHERE seq NOT IN temp.kept")
        connection.execute("DROP TABLE temp.old")
        connection.execute("DROP TABLE temp.kept")
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
