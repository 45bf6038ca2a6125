"""Leases in SQLite: who takes a waiting rollout, who keeps an attempt, and who may end it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agl_core.errors import StoreError
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Ending, Rollout, RolloutState

A, B = AttemptKey("a", 0), AttemptKey("b", 0)


async def claimed(store: SqliteStore, count: int = 9, worker: str = "w") -> list[AttemptKey]:
    return [attempt.key for _, attempt in await store.claim(worker, count, 0)]


def ended(rollout: Rollout) -> Rollout:
    return make.rollout(rollout.id, state=RolloutState.DONE, ending=Ending.FINISHED, counted_attempt=0)


async def test_a_claim_takes_what_waits_longest_and_a_rollout_that_is_tried_again_first(store: SqliteStore) -> None:
    await store.put(*(make.rollout(id) for id in "abc"))
    (rollout, attempt), _ = await store.claim("w", 2, 0)
    assert (rollout, attempt.worker) == (make.rollout("a", state=RolloutState.RUNNING), "w")
    assert await store.rollout("a") == rollout
    assert await store.attempts("a") == [attempt]
    assert await store.end(A, make.rollout("a"))
    assert await claimed(store) == [("a", 1), ("c", 0)]
    assert await store.leases() == (0, {("a", 1): 0, B: 0, ("c", 0): 0})


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


async def test_a_heartbeat_renews_what_it_names_and_what_its_worker_never_renewed(store: SqliteStore) -> None:
    await store.put(*(make.rollout(id) for id in "abc"))
    await claimed(store, 2, "v")
    await claimed(store, 1, "w")
    assert await store.renew("v", [A, AttemptKey("nobody", 0)]) == {A}
    assert await store.renew("v", [B]) == {B}
    assert await store.leases() == (0, {A: 1, B: 2, ("c", 0): 0})


async def test_what_waits_is_withdrawn_and_what_is_leased_is_named(store: SqliteStore) -> None:
    await store.put(*(make.rollout(id) for id in "abc"))
    await claimed(store, 1)
    withdrawing, claiming = store.withdraw(["a", "b", "nobody"], Ending.CANCELLED), claimed(store)
    assert await asyncio.gather(withdrawing, claiming) == [(1, [A]), [("c", 0)]]
    [cancelled] = await store.done(["a", "b"])
    assert (cancelled.id, cancelled.ending, cancelled.counted_attempt) == ("b", Ending.CANCELLED, None)


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
