"""Leases in SQLite: writes that meet, fail or are cancelled, and other processes. The queue's tests have the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agl_core.errors import StoreError
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Ending, Rollout, RolloutState
from agl_server.store.sqlite import SqliteStore

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
    [_, (withdrawn, held)] = await asyncio.gather(claimed(store), store.withdraw(["a"], Ending.CANCELLED))
    assert (withdrawn, held) in [(1, []), (0, [A])]
    await store.put(make.rollout("b"))
    [key] = await claimed(store, 1)
    [_, (withdrawn, held)] = await asyncio.gather(
        store.end(key, make.rollout(key.rollout)), store.withdraw([key.rollout], Ending.CANCELLED)
    )
    assert (withdrawn, held) in [(1, []), (0, [key])]


async def test_a_cancelled_claim_takes_nothing(store: SqliteStore) -> None:
    await store.put(make.rollout("a"))
    claiming = asyncio.create_task(store.claim("w", 1, 0))
    await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.wait([claiming])
    assert await claimed(store) == [A]


async def test_leases_outlive_the_process_that_gave_them(tmp_path: Path) -> None:
    for _ in range(2):
        async with SqliteStore(tmp_path / "store.sqlite") as store:
            if not await store.rollouts():
                await store.put(make.rollout("a"))
                await claimed(store)
            assert await store.leases() == (0, {A: 0})
