"""Writing: replacing, repeating, all or none, together."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.store import tables
from agl_core.store.interface import Store
from agl_core.store.sqlite import SqliteOptions, SqliteStore, build
from agl_core.types import (
    AttemptKey,
    Choice,
    Ending,
    FinishReason,
    Reward,
    RolloutState,
    Run,
    Source,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)

KEY = AttemptKey("r", 0)


def commits_in_log(path: Path) -> int:
    """The number of transactions in a write-ahead log, by SQLite's file format: a commit's last frame is marked."""
    log = path.with_name(path.name + "-wal").read_bytes()
    page_size = struct.unpack(">I", log[8:12])[0]
    salt = log[16:24]
    frames = (log[start : start + 24] for start in range(32, len(log), page_size + 24))
    return sum(1 for frame in frames if frame[8:16] == salt and struct.unpack(">I", frame[4:8])[0] > 0)


async def test_the_same_records_twice_change_nothing(
    store: Store, make_rollout: Any, make_attempt: Any, make_call: Any, exactly: Any
) -> None:
    records = [
        Run("run", 0, 1.0, {"a": 1}),
        make_rollout("r"),
        make_attempt("r"),
        make_call("c"),
        ToolResult("o", "r", 0, "add", ToolStatus.OK, result=2),
        Reward("r", 0, "right", 1.0, "rule"),
        Reward("r", 0, "right", 1.0, "rule", call="c"),
        TrainingRecord("r", 0, "c", 0, 0, 1.0, 0.5, 0.1),
    ]

    async def everything() -> Any:
        return exactly(
            [
                await store.runs(),
                await store.rollouts(),
                await store.attempts("r"),
                await store.calls([KEY]),
                await store.tool_results([KEY]),
                await store.rewards([KEY]),
                await store.training_records([KEY]),
            ]
        )

    await store.put(*records)
    once = await everything()
    await store.put(*records)
    await asyncio.gather(*(store.put(*records) for _ in range(5)))
    assert await everything() == once
    assert [len(found) for found in (await store.rewards([KEY]), await store.calls([KEY]))] == [2, 1]


async def test_a_record_replaces_the_one_with_its_key_and_keeps_its_place(store: Store, make_rollout: Any) -> None:
    await store.put(make_rollout("b"), make_rollout("a"))
    done = make_rollout("b", state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED)
    await store.put(make_rollout("b", state=RolloutState.RUNNING), done)
    assert await store.rollouts() == [done, make_rollout("a")]


async def test_a_call_that_replaces_another_takes_its_choices_along(
    store: Store, make_call: Any, calls_of: Any
) -> None:
    three = tuple(Choice(index, {"content": str(index)}, FinishReason.STOP) for index in range(3))
    last = make_call("c", choices=(dataclasses.replace(three[0], message={"content": "new"}),), late=True)
    await store.put(make_call("c", choices=three))
    await asyncio.gather(store.put(make_call("c", choices=three)), store.put(last))
    call = (await calls_of(store, "r"))["c"]
    assert (call.late, [choice.message for choice in call.choices]) == (True, [{"content": "new"}])


async def test_two_calls_with_equal_content_are_two(store: Store, make_call: Any) -> None:
    one = make_call("one")
    await store.put(one, dataclasses.replace(one, id="two", sequence=1))
    assert [call.id for call in await store.calls([KEY])] == ["one", "two"]


async def test_ids_of_tool_results_are_unique_in_their_attempt_only(store: Store) -> None:
    await store.put(*(ToolResult("call_1", rollout, 0, "add", ToolStatus.OK) for rollout in ("r", "s")))
    assert len(await store.tool_results([KEY, AttemptKey("s", 0)])) == 2


async def test_the_first_tool_result_of_an_id_stands_and_only_what_it_left_open_is_added(store: Store) -> None:
    first = ToolResult("1:2", "r", 0, "add", ToolStatus.ERROR, error="no", parent_span="s", source=Source.SPAN)
    later = ToolResult(
        *("1:2", "r", 0, "mul", ToolStatus.OK, "c1", {"a": 1}, 3, None, "solver", "x", "y", 1.0, 2.0),
        source=Source.SPAN,
    )
    own = dataclasses.replace(later, source=Source.ADAPTER)
    await store.put(first)
    await store.put(later, own)
    await store.put(dataclasses.replace(later, tool_call_id="c2", agent="another"))
    kept = dataclasses.replace(first, tool_call_id="c1", agent="solver")
    assert await store.tool_results([KEY]) == [kept, own]


async def test_concurrent_puts_are_committed_together(
    store: SqliteStore, path: Path, make_call: Any, calls_of: Any
) -> None:
    before = commits_in_log(path)
    await asyncio.gather(*(store.put(make_call(f"c{number}")) for number in range(300)))
    assert 1 <= commits_in_log(path) - before <= 3
    assert len(await calls_of(store, "r")) == 300


BAD_RECORDS = {
    "not JSON": lambda make: make("bad", result=object()),
    "no UTF-8 in a key": lambda make: make("bad\ud800"),
    "a NUL in a key": lambda make: make("bad\0"),
    "beyond 64 bits": lambda make: make("bad", 2**70),
    "no start": lambda make: make("bad", started=None),
    "a float for an integer": lambda make: make("bad", 0.5),
    "not a record": lambda make: {"rollout": "bad"},
}


@pytest.mark.parametrize("bad", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
async def test_a_bad_record_fails_its_own_put_as_a_whole_and_no_other(
    store: Store, make_attempt: Any, make_call: Any, bad: Any
) -> None:
    good = [store.put(make_attempt("r", number), make_call(f"c{number}")) for number in range(20)]
    together = store.put(make_attempt("r", 100), make_call("companion"), bad(make_attempt), make_attempt("r", 101))
    results = await asyncio.gather(*good[:10], together, *good[10:], return_exceptions=True)
    errors = [result for result in results if result is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], StoreError)
    assert re.search(r"Attempt \(rollout '(r|bad)|not dict", str(errors[0]))
    assert [attempt.attempt for attempt in await store.attempts("r")] == list(range(20))
    assert len(await store.calls([KEY])) == 20
    # The pieces of the refused put are written by the next one that has them.
    await store.put(make_call("companion"))
    assert "companion" in {call.id for call in await store.calls([KEY])}


async def test_forgotten_pieces_are_found_again(path: Path, make_call: Any, exactly: Any) -> None:
    first, second = make_call("one"), make_call("two", sequence=1, request=make_call("one").request)
    async with SqliteStore(path) as store:
        await store.put(first)
    async with SqliteStore(path) as store:
        await store.put(second)
        assert exactly(await store.calls([KEY])) == exactly([first, second])


async def test_a_cancelled_put_does_not_disturb_others(store: Store, make_call: Any, calls_of: Any) -> None:
    puts = [asyncio.create_task(store.put(make_call(f"c{number}"))) for number in range(10)]
    await asyncio.sleep(0)
    puts[3].cancel()
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [asyncio.CancelledError]
    assert {f"c{number}" for number in range(10) if number != 3} <= set(await calls_of(store, "r"))


async def test_close_finishes_what_was_accepted(path: Path, make_call: Any, calls_of: Any) -> None:
    store = SqliteStore(path)
    await store.open()
    puts = [asyncio.create_task(store.put(make_call(f"c{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    async with SqliteStore(path, read_only=True) as reader:
        assert len(await calls_of(reader, "r")) == 50


async def test_a_store_that_is_not_open_says_so(path: Path, make_call: Any) -> None:
    store = SqliteStore(path)
    for _ in range(2):
        with pytest.raises(StoreError, match="not open"):
            await store.put(make_call("c"))
        with pytest.raises(StoreError, match="not open"):
            await store.runs()
        async with store:
            with pytest.raises(StoreError, match="open already"):
                await store.open()
            await store.put()
        await store.close()


async def test_the_plugin_puts_the_file_into_the_folder(tmp_path: Path, make_rollout: Any) -> None:
    async with build(SqliteOptions(), tmp_path) as store:
        await store.put(make_rollout("r"))
    assert (tmp_path / "store.sqlite").is_file()


async def test_large_batches_cross_the_statement_size(store: Store, make_attempt: Any) -> None:
    many = [make_attempt("r", number) for number in range(777)]
    await store.put(*many)
    assert await store.attempts("r") == many


def test_every_table_is_written() -> None:
    assert len({table.name for table in tables.TABLES}) == len(tables.TABLES)
