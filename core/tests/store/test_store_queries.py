"""Reading: filters, prefixes, orders, many attempts at once."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.store import queries, tables
from agl_core.store.connections import connect_reader
from agl_core.store.interface import Store
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Mode, RolloutState, Run, ToolResult, ToolStatus


async def test_runs_come_oldest_first(store: Store) -> None:
    recorded = [Run("b", 0, 5.0, {}), Run("a", 0, 6.0, {}), Run("b", 1, 7.0, {}, resumed_step=3)]
    for run in recorded:
        await store.put(run)
    assert await store.runs() == recorded


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, ["d", "c", "b", "a"]),
        ({"limit": 2}, ["d", "c"]),
        ({"limit": 0}, []),
        ({"newest": 2}, ["b", "a"]),
        ({"newest": 3, "limit": 1}, ["c"]),
        ({"newest": 9, "run": "one"}, ["d", "c", "b"]),
        ({"after": "c"}, ["b", "a"]),
        ({"after": "d", "limit": 2, "step": 1}, ["c", "b"]),
        ({"after": "unknown"}, []),
        ({"run": "one"}, ["d", "c", "b"]),
        ({"step": 0}, ["d", "a"]),
        ({"mode": Mode.TRAIN}, ["d", "c", "a"]),
        ({"state": RolloutState.QUEUED}, ["c", "b", "a"]),
        ({"group": "g2"}, ["c", "b"]),
        ({"run": "one", "step": 1, "mode": Mode.TRAIN, "state": RolloutState.QUEUED, "group": "g2"}, ["c"]),
        ({"run": "none"}, []),
    ],
)
async def test_rollouts_by(store: Store, make_rollout: Any, wanted: dict[str, Any], expected: list[str]) -> None:
    await store.put(
        make_rollout("d", run="one", step=0, group="g1", state=RolloutState.DONE),
        make_rollout("c", run="one", step=1, group="g2"),
        make_rollout("b", run="one", step=1, group="g2", mode=Mode.EVAL_GREEDY),
        make_rollout("a", run="two", step=0, group="g3"),
    )
    assert [rollout.id for rollout in await store.rollouts(**wanted)] == expected


@pytest.mark.parametrize("wrong", [AttemptKey("a", 0), "a", ["a"], [("a", "0")], [None], [AttemptKey("a", 0), "b"]])
@pytest.mark.parametrize("method", ["calls", "tool_results", "rewards", "training_records", "annotations"])
async def test_what_is_no_list_of_attempts_is_a_type_error(path: Path, method: str, wrong: Any) -> None:
    async with SqliteStore(path) as store:
        with pytest.raises(TypeError, match="several attempts"):
            await getattr(store, method)(wrong)


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.attempts(["a"]),
        lambda store: store.attempts(AttemptKey("a", 0)),
        lambda store: store.rollout(None),
        lambda store: store.rollout(AttemptKey("a", 0)),
        lambda store: store.erase("ab"),
        lambda store: store.erased("ab"),
        lambda store: store.erase([1]),
        lambda store: store.rollouts(run=["a"]),
        lambda store: store.rollouts(newest="3"),
        lambda store: store.rollouts(runs="a"),
    ],
)
async def test_what_is_no_id_or_filter_is_a_type_error(path: Path, make_rollout: Any, ask: Any) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_rollout("a"), make_rollout("b"))
        with pytest.raises(TypeError):
            await ask(store)
        assert len(await store.rollouts()) == 2


async def test_a_rollout_by_the_start_of_its_id(store: Store, make_rollout: Any, path: Path) -> None:
    await store.put(*(make_rollout(id) for id in ("ab1", "ab10", "b%_", "ü\U0010ffff")))
    for prefix, expected in {"ab10": "ab10", "ab1": "ab1", "b": "b%_", "b%_": "b%_", "ü": "ü\U0010ffff"}.items():
        assert (await store.rollout(prefix)).id == expected
    with pytest.raises(StoreError, match=r"ab1, ab10\. Give more"):
        await store.rollout("ab")
    for missing in ("AB", "b_", "%", "zz"):
        with pytest.raises(StoreError, match=rf"No rollout in {re.escape(str(path))}.*`agl rollouts`"):
            await store.rollout(missing)


async def test_attempts_are_in_order(store: Store, make_attempt: Any) -> None:
    await store.put(make_attempt("r", 1), make_attempt("other", 0), make_attempt("r", 0))
    assert await store.attempts("r") == [make_attempt("r", 0), make_attempt("r", 1)]
    assert await store.attempts("none") == []


async def test_calls_of_many_attempts(store: Store, make_call: Any) -> None:
    rollouts = [f"r{number}" for number in range(1500)]
    await store.put(
        *(make_call(f"{rollout}-{sequence}", rollout, sequence=sequence) for rollout in rollouts for sequence in (1, 0))
    )
    asked = [rollouts[5], rollouts[3], "none", rollouts[5]]
    read = await store.calls(AttemptKey(rollout, 0) for rollout in asked)
    assert [call.id for call in read] == ["r5-0", "r5-1", "r3-0", "r3-1"]
    assert len(await store.calls([AttemptKey(rollout, 0) for rollout in rollouts])) == 3000
    assert await store.calls([AttemptKey("r5", 1)]) == []
    assert await store.calls([]) == []


async def test_tool_results_are_in_the_order_they_were_recorded(store: Store) -> None:
    def tool_result(id: str, rollout: str) -> ToolResult:
        return ToolResult(id, rollout, 0, "add", ToolStatus.OK)

    await store.put(tool_result("z", "r"), tool_result("y", "s"))
    await store.put(tool_result("a", "r"), tool_result("x", "unasked"))
    await store.put(tool_result("z", "r"))
    found = await store.tool_results([AttemptKey("s", 0), AttemptKey("r", 0)])
    assert [each.id for each in found] == ["z", "y", "a"]


async def test_no_query_by_key_scans_a_table(store: Store, path: Path, make_call: Any, make_rollout: Any) -> None:
    await store.put(make_rollout("r"), make_call("c", "r"))
    keys = [AttemptKey("r", 0), AttemptKey("s", 1)]
    asked: list[str] = []
    connection = connect_reader(path, unchanging=False)
    connection.set_trace_callback(asked.append)
    queries.rollout(connection, "r", "here")
    queries.rollouts(connection, {"run": "run", "step": 0}, None)
    queries.rollouts(connection, {"grp": "group"}, None)
    queries.rollouts(connection, {"state": "queued"}, 10)
    queries.attempts(connection, ["r"])
    queries.calls(connection, keys)
    for table in (tables.TOOL_RESULTS, tables.REWARDS, tables.TRAINING_RECORDS):
        queries.recorded(connection, table, keys)
    connection.set_trace_callback(None)
    # A query that calls json_each() is traced a second time, as the comment that SQLite makes of the inner one.
    statements = [statement for statement in asked if not statement.startswith("--")]
    assert len(statements) == 12
    for statement in statements:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
        assert not [step for step in plan if step.startswith("SCAN") and "asked" not in step], (statement, plan)
    connection.close()


async def test_reads_run_while_writes_do(store: Store, make_call: Any, calls_of: Any) -> None:
    async def write_then_read(number: int) -> None:
        await store.put(make_call(f"c{number}", f"r{number}"))
        assert f"c{number}" in await calls_of(store, f"r{number}")

    await asyncio.gather(*(write_then_read(number) for number in range(100)))


def test_the_readers_connection_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with pytest.raises(StoreError, match="There is no store"):
        connect_reader(path, unchanging=False)
    sqlite3.connect(path).close()
    with pytest.raises(StoreError, match="is empty"):
        connect_reader(path, unchanging=False)
