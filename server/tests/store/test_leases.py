"""Leases in SQLite, and rollouts that are removed for good: writes that meet, fail or are cancelled."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import StoreError
from agl_core.testing import episodes as make
from agl_core.types import (
    Annotation,
    AttemptKey,
    Ending,
    Reward,
    Rollout,
    RolloutState,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_server.store import sqlite
from agl_server.store.sqlite import SqliteStore

from .any_records import exactly, make_call

A = AttemptKey("a", 0)


async def claimed(store: SqliteStore, count: int = 9) -> list[AttemptKey]:
    return [attempt.key for _, attempt in await store.claim("w", count, 0)]


def ended(rollout: Rollout) -> Rollout:
    return make.rollout(rollout.id, state=RolloutState.DONE, ending=Ending.FINISHED, counted_attempt=0)


async def test_only_the_first_end_of_an_attempt_is_written(store: SqliteStore) -> None:
    await store.put(make.rollout("a"))
    [(rollout, attempt)] = await store.claim("w", 1, 0)
    again = ended(rollout), make.attempt("a", worker="late")
    assert await asyncio.gather(store.end(A, ended(rollout), attempt), store.end(A, *again)) == [True, False]
    assert await store.attempts("a") == [attempt]
    assert await store.done(["a", "b"]) == [ended(rollout)]
    assert await store.leases() == (0, {})


async def test_an_end_that_cannot_be_stored_ends_nothing(store: SqliteStore) -> None:
    await store.put(make.rollout("a"))
    await claimed(store)
    with pytest.raises(StoreError):
        await store.end(A, make.rollout("a\0"))
    assert await store.leases() == (0, {A: 0})


async def test_what_is_withdrawn_while_it_is_claimed_or_tried_again_waits_or_is_leased(store: SqliteStore) -> None:
    """Committed together, none of them sees the other half done."""
    await store.put(make.rollout("a"))
    [_, (cancelled, held)] = await asyncio.gather(claimed(store), store.cancel_waiting(["a"], Ending.CANCELLED))
    assert (cancelled, held) in [(1, []), (0, [A])]
    await store.put(make.rollout("b"))
    [key] = await claimed(store, 1)
    [_, (cancelled, held)] = await asyncio.gather(
        store.end(key, make.rollout(key.rollout)), store.cancel_waiting([key.rollout], Ending.CANCELLED)
    )
    assert (cancelled, held) in [(1, []), (0, [key])]


async def test_a_cancelled_claim_takes_nothing(store: SqliteStore) -> None:
    await store.put(make.rollout("a"))
    claiming = asyncio.create_task(store.claim("w", 1, 0))
    await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.wait([claiming])
    assert await claimed(store) == [A]


SHARED = {"role": "system", "content": "You answer the questions of customers."}


def asking(id: str, rollout: str, text: str, **changes: Any) -> Any:
    request = {"model": "default", "messages": [SHARED, {"role": "user", "content": text}]}
    return make_call(id, rollout, request=request, **changes)


def raw(path: Path) -> bytes:
    """The bytes of all of the store's files."""
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


async def test_nothing_of_an_erased_rollout_is_left_in_the_file(path: Path) -> None:
    kept = asking("b", "kept", "where is my order?")
    async with SqliteStore(path) as store:
        await store.put(
            *(make.rollout(id) for id in ("gone", "kept")),
            *(make.attempt(id, error=f"the error of {id}") for id in ("gone", "kept")),
            asking("a", "gone", "my name is Rumpelstilzchen"),
            kept,
            ToolResult("x", "gone", 0, "look", ToolStatus.OK, result="a secret result"),
            Reward("gone", 0, "a-secret-name", 1.0, "rule"),
            TrainingRecord("gone", 0, "a", 0, 1, 1.0, 0.5, 0.25),
            Annotation("gone", 0, "f", 1.0, {"correction": "a secret correction"}),
        )
        assert b"Rumpelstilzchen" in raw(path)
        assert await store.erase(["gone", "never there"]) == 1
        for text in (b"Rumpelstilzchen", b"the error of gone", b"secret"):
            assert text not in raw(path), text
        key = AttemptKey("gone", 0)
        assert [rollout.id for rollout in await store.rollouts()] == ["kept"]
        for read in (store.calls, store.rewards, store.tool_results, store.training_records, store.annotations):
            assert await read([key]) == []
        assert exactly(await store.calls([kept.key])) == exactly([kept])
        assert await store.erased(["gone", "never there", "kept"]) == {"gone", "never there"}
        assert await store.erase(["gone"]) == 0
        # The shared message goes with the last call that has it.
        await store.erase(["kept"])
        assert b"customers" not in raw(path)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_reader_is_waited_for_before_an_erased_text_is_out_of_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 30.0 if leaves else 0.3)
    async with SqliteStore(path) as store:
        await store.put(make.rollout("gone"), asking("a", "gone", "my name is Rumpelstilzchen"))
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM records").fetchone()
            erasing = asyncio.create_task(store.erase(["gone"]))
            await store.put(make.rollout("meanwhile"))
            if leaves:
                await asyncio.sleep(0.3)
                assert not erasing.done()
                reader.execute("ROLLBACK")
            assert await erasing == 1
            assert (b"Rumpelstilzchen" in raw(path)) is not leaves
    assert ("has been reading the store" in caplog.text) is not leaves
    assert b"Rumpelstilzchen" not in raw(path)


async def test_what_is_written_while_others_are_erased_is_whole(path: Path) -> None:
    """Calls share their first messages with what is being removed, and blocks of tokens too."""
    ids = np.arange(600, dtype=np.int32)

    def call(number: int) -> Any:
        return asking(f"c{number}", f"r{number}", "the same for all", prompt_ids=ids)

    async with SqliteStore(path) as store:
        await store.put(make.rollout("r0"), call(0))

        async def write(number: int) -> None:
            await store.put(make.rollout(f"r{number}"), call(number))

        for start in range(1, 40, 4):
            await asyncio.gather(*(write(start + i) for i in range(2)), store.erase([f"r{start - 1}"]))
            await asyncio.gather(store.erase([f"r{start}"]), *(write(start + i) for i in range(2, 4)))
        kept = [int(rollout.id[1:]) for rollout in await store.rollouts()]
        assert len(kept) > 10
        for number in kept:
            assert exactly(await store.calls([AttemptKey(f"r{number}", 0)])) == exactly([call(number)])
