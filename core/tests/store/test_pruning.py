"""Old calls without their texts and tokens: smaller, still readable, and all at once or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import StoreError
from agl_core.store import removing
from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Choice, FinishReason, Reward, RolloutState, TrainingRecord

STEPS = 4
SYSTEM = {"role": "system", "content": "shared by all " * 50}
TOOL_CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"secret": 1}'}}


@pytest.fixture
async def records(path: Path, make_rollout: Any, make_attempt: Any, make_call: Any) -> list[Any]:
    """A rollout of each step with one call, and one of the last step that is not done."""
    generator = np.random.default_rng(0)
    made: list[Any] = []
    for step in range(1, STEPS + 1):
        name = f"r{step}"
        made += [
            make_rollout(name, step=step, state=RolloutState.DONE, counted_attempt=0),
            make_attempt(name),
            make_call(
                f"c{step}",
                name,
                agent="solver",
                request={"model": "m", "messages": [SYSTEM, {"role": "user", "content": f"secret {step} " * 100}]},
                choices=(
                    Choice(
                        0,
                        {"role": "assistant", "content": f"secret {step}", "tool_calls": [TOOL_CALL]},
                        FinishReason.TOOL_CALLS,
                        generator.integers(0, 2**31, 500, dtype=np.int32),
                        generator.standard_normal(500, dtype=np.float32),
                    ),
                ),
                prompt_ids=generator.integers(0, 2**31, 2000, dtype=np.int32),
            ),
            Reward(name, 0, "right", 1.0, "right"),
            TrainingRecord(name, 0, f"c{step}", 0, step, 1.0, 0.5, 1.0),
        ]
    made += [make_rollout("late", step=1), make_attempt("late"), make_call("c-late", "late")]
    async with SqliteStore(path) as store:
        await store.put(*made)
    return made


def everything(path: Path) -> dict[str, list[Any]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables}


async def test_old_calls_lose_texts_and_tokens_and_nothing_else_changes(
    path: Path, records: list[Any], exactly: Any
) -> None:
    before = everything(path)
    async with SqliteStore(path) as store:
        assert await store.prune(2) == 2
        assert await store.prune(2) == 0
    async with SqliteStore(path, read_only=True) as store:
        calls = {c.id: c for c in await store.calls([AttemptKey(f"r{n}", 0) for n in range(1, 5)])}
        (late,) = await store.calls([AttemptKey("late", 0)])
    made = {record.id: record for record in records if hasattr(record, "choices")}
    for kept in ("c3", "c4"):
        assert exactly(calls[kept]) == exactly(made[kept])
    assert exactly(late) == exactly(made["c-late"])
    for gone in ("c1", "c2"):
        call = calls[gone]
        assert call.pruned
        assert (call.request, call.prompt_ids, call.choices[0].response_ids) == ({}, None, None)
        assert (call.agent, call.policy, call.version, call.sequence) == ("solver", "default", 3, 0)
        (asked,) = call.choices[0].message["tool_calls"]
        assert (asked["id"], asked["function"]["name"]) == ("t1", "add")
    after = everything(path)
    assert {name for name in before if before[name] != after[name]} == {"calls", "choices", "pieces"}
    assert "secret 1" not in str(after)
    assert "secret 3" in str(after)


async def test_what_later_calls_share_with_old_ones_stays(path: Path, records: list[Any], make_call: Any) -> None:
    async with SqliteStore(path) as store:
        await store.prune(3)
    async with SqliteStore(path) as store:
        await store.put(make_call("new", "r4", request={"messages": [SYSTEM]}))
        found = {call.id: call for call in await store.calls([AttemptKey("r4", 0)])}
    assert found["c4"].request["messages"][0] == found["new"].request["messages"][0] == SYSTEM


def size(path: Path) -> int:
    return path.stat().st_size


async def test_the_space_is_given_back(path: Path, records: list[Any], make_rollout: Any) -> None:
    before = size(path)
    async with SqliteStore(path) as store:
        await store.prune(STEPS)
        await store.vacuum()
        assert size(path) < 0.9 * before
        await store.put(make_rollout("after"))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_pruning_that_fails_changes_nothing(
    path: Path, records: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(path)
    monkeypatch.setattr(removing, "_drop_unused", lambda connection, pieces: 1 // 0)
    async with SqliteStore(path) as store:
        with pytest.raises(ZeroDivisionError):
            await store.prune(2)
    assert everything(path) == before


async def test_a_store_that_is_written_is_not_pruned(path: Path, records: list[Any]) -> None:
    async with SqliteStore(path):
        with pytest.raises(StoreError, match="is being written"):
            async with SqliteStore(path) as other:
                await other.prune(2)
    async with SqliteStore(path, read_only=True) as reader:
        with pytest.raises(StoreError, match="not open for writing"):
            await reader.prune(2)
