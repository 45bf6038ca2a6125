"""Versions of the schema: empty to current, current to next, and files that are not ours."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import StoreError
from agl_core.store import schema, tables
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Ending, Feedback, Source, ToolStatus, TrainingRecord

NEXT = """
ALTER TABLE rollouts ADD COLUMN note TEXT NOT NULL DEFAULT 'none';
UPDATE rollouts SET note = 'migrated ' || id;
CREATE TABLE notes (text TEXT);
"""


def ask(path: Path, question: str) -> Any:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(question).fetchall()
    finally:
        connection.close()


def content(path: Path) -> bytes:
    return path.read_bytes()


def known(monkeypatch: pytest.MonkeyPatch, *further: str) -> None:
    """Make this agl one that knows further versions."""
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, *further))


async def test_a_new_file_has_the_current_version(path: Path) -> None:
    async with SqliteStore(path):
        pass
    assert ask(path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]


async def test_an_older_file_is_brought_up_to_date_and_keeps_its_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_rollout: Any, make_call: Any, exactly: Any
) -> None:
    call = make_call("c")
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"), call)
    old = len(schema.MIGRATIONS)
    known(monkeypatch, NEXT, "DROP TABLE notes")
    async with SqliteStore(path) as store:
        assert await store.rollouts() == [make_rollout("r")]
        assert exactly(await store.calls([call.key])) == exactly([call])
        await store.put(make_rollout("s"))
    assert ask(path, "PRAGMA user_version") == [(old + 2,)]
    assert ask(path, "SELECT id, note FROM rollouts") == [("r", "migrated r"), ("s", "none")]
    assert ask(path, "SELECT name FROM sqlite_master WHERE name = 'notes'") == []


async def test_the_calls_of_a_file_of_version_5_were_delivered(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_rollout: Any, make_attempt: Any, make_call: Any, exactly: Any
) -> None:
    calls = [make_call("a"), make_call("b", late=True)]
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"), make_attempt("r"), *calls)
    with sqlite3.connect(path) as connection:  # what version 6 added is all that a file of version 5 lacks
        connection.executescript(
            "DROP INDEX calls_trace; ALTER TABLE calls DROP COLUMN trace;"
            "ALTER TABLE calls DROP COLUMN undelivered; ALTER TABLE calls DROP COLUMN stamped;"
            "ALTER TABLE attempts DROP COLUMN passed_through; ALTER TABLE attempts DROP COLUMN bypassed;"
            "DROP TABLE feedback; DROP TABLE erased;"
            "PRAGMA user_version = 5"
        )
    connection.close()
    async with SqliteStore(path) as store:
        found = await store.calls([calls[0].key])
        assert exactly(found) == exactly(calls)
        assert [(call.undelivered, call.stamped) for call in found] == [(False, True)] * 2
        await store.put(replace(calls[0], undelivered=True, stamped=False))
        assert [call.undelivered for call in await store.calls([calls[0].key])] == [True, False]
    assert ask(path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]


async def test_a_file_of_version_6_takes_feedback_and_can_erase(
    path: Path, make_rollout: Any, make_attempt: Any, make_call: Any, exactly: Any
) -> None:
    """`schema_6.sql` is the dump of a store that an agl wrote whose schema had version 6."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "schema_6.sql").read_text())
    key, said = AttemptKey("r", 0), Feedback("r", 0, "f", 1.0, {"thumbs": 1.0}, call="a")
    async with SqliteStore(path) as store:
        assert await store.rollouts() == [make_rollout("r"), make_rollout("s")]
        assert await store.attempts("r") == [make_attempt("r")]
        calls = await store.calls([key, AttemptKey("s", 0)])
        assert exactly(calls) == exactly([make_call("a"), make_call("b", "s")])
        assert await store.feedback([key]) == []
        await store.put(said, make_call("c", "s", trace="4bf9"))
        assert await store.feedback([key]) == [said]
        assert await store.traced("4bf9") == [("s", "c")]
        assert await store.erase(["r"]) == 1
        assert exactly((await store.calls([key, AttemptKey("s", 0)]))[:1]) == exactly(calls[1:])
    assert ask(path, "PRAGMA user_version") == [(len(schema.MIGRATIONS),)]


async def test_a_file_with_one_use_of_each_transition_takes_one_of_each_step(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_attempt: Any
) -> None:
    attempt, record = make_attempt("r"), TrainingRecord("r", 0, "c", 0, 1, 1.0, 0.5, 0.25)
    with monkeypatch.context() as older:
        older.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        async with SqliteStore(path):
            pass
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO attempt_keys (rollout, attempt) VALUES (?, ?)", attempt.key)
        connection.execute("INSERT INTO uses SELECT 1, seq, 'c', 0, 1, 1.0, 0.5, 0.25, NULL FROM attempt_keys")
    connection.close()
    async with SqliteStore(path) as store:
        assert await store.training_records([attempt.key]) == [record]
        changed, again = replace(record, weight=0.75), replace(record, step=2)
        await store.put(again, changed)
        assert await store.training_records([attempt.key]) == [changed, again]


async def test_a_file_of_an_earlier_agl_is_migrated_whole(path: Path) -> None:
    """`schema_3.sql` is the dump of a store that an agl wrote whose schema had version 3."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "schema_3.sql").read_text())
    key = AttemptKey("s1-g0-m0", 0)
    async with SqliteStore(path) as store:
        assert [(run.restart, run.resumed_step) for run in await store.runs()] == [(0, None), (1, 2)]
        rollout = await store.rollout("s1-g0-m0")
        assert (rollout.restart, rollout.group, rollout.position, rollout.ending) == (1, "s1-g0", 0, Ending.FINISHED)
        assert rollout.task.metadata == {"answer": 3}
        [call] = await store.calls([key])
        assert call.prompt_ids is not None
        assert call.prompt_ids.tolist() == list(range(300))
        assert call.request["messages"] == [{"role": "user", "content": "1+2?"}]
        assert (call.effective.seed, call.state, call.pruned) == (7, {"turn": 1}, False)
        [choice] = call.choices
        assert choice.response_ids is not None
        assert choice.logprobs is not None
        assert choice.mask is not None
        assert (choice.response_ids.tolist(), choice.mask.tolist()) == ([5, 6, 7], [True, True, False])
        assert choice.logprobs[:2].tolist() == [-0.5, -0.25]
        results = await store.tool_results([key])
        assert [(each.source, each.adapter, each.status, each.error, each.status_rule) for each in results] == [
            (Source.ADAPTER, "langchain", ToolStatus.OK, None, None),
            (Source.SPAN, "otel", ToolStatus.ERROR, "no \udc80", None),
        ]
        assert (results[0].tool_call_id, results[0].result, results[0].parent_span) == ("call_1", "3", "span1")
        assert {(each.name, each.source): each.value for each in await store.rewards([key])} == {
            ("answer", "answer"): 1.0,
            ("add.0.ok", "tool_results"): 0.2,
            ("speed", "agent"): 0.5,
        }
        assert [(each.step, each.credit, each.dropped) for each in await store.training_records([key])] == [
            (1, 1.0, None),
            (2, None, "stale"),
        ]
        await store.put(*results, replace(rollout, position=7))
        assert await store.tool_results([key]) == results
        ruled = replace(results[0], id="new", status_rule="error")
        await store.put(ruled)
        assert await store.tool_results([key]) == [*results, ruled]
        assert [each.position for each in await store.rollouts()] == [7]


async def test_a_reader_does_not_migrate(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SqliteStore(path):
        pass
    before = content(path)
    known(monkeypatch, NEXT)
    old = len(schema.MIGRATIONS) - 1
    told = rf"store\.sqlite has schema version {old}, this agl reads version {old + 1}.*Open it once"
    with pytest.raises(StoreError, match=told):
        await SqliteStore(path, read_only=True).open()
    assert content(path) == before


async def test_a_migration_that_fails_leaves_the_version_before_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, make_rollout: Any
) -> None:
    async with SqliteStore(path) as store:
        await store.put(make_rollout("r"))
    with monkeypatch.context() as newer:
        known(newer, NEXT, "CREATE TABLE half (x); INSERT INTO nowhere VALUES (1)")
        with pytest.raises(StoreError, match=r"store\.sqlite.*no such table: nowhere"):
            await SqliteStore(path).open()
        assert ask(path, "PRAGMA user_version") == [(len(schema.MIGRATIONS) - 1,)]
    assert ask(path, "SELECT note FROM rollouts") == [("migrated r",)]
    assert ask(path, "SELECT name FROM sqlite_master WHERE name = 'half'") == []


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_newer_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool) -> None:
    with monkeypatch.context() as newer:
        known(newer, NEXT)
        async with SqliteStore(path):
            pass
    known_now = len(schema.MIGRATIONS)
    told = rf"has schema version {known_now + 1}, and this agl knows versions up to {known_now}\. Use the agl"
    with pytest.raises(StoreError, match=told):
        await SqliteStore(path, read_only=read_only).open()
    assert ask(path, "PRAGMA user_version") == [(known_now + 1,)]


@pytest.mark.parametrize("read_only", [False, True])
async def test_another_programs_database_is_left_alone(path: Path, read_only: bool) -> None:
    ask(path, "CREATE TABLE bookmarks (url)")
    before = content(path)
    with pytest.raises(StoreError, match=r"store\.sqlite is another program's SQLite database"):
        await SqliteStore(path, read_only=read_only).open()
    assert content(path) == before


async def test_the_columns_written_are_the_columns_there(store: SqliteStore, path: Path) -> None:
    for table in tables.TABLES:
        assert [row[1] for row in ask(path, f"PRAGMA table_info({table.name})")] == list(
            dict.fromkeys(["seq", *table.columns])
        )
