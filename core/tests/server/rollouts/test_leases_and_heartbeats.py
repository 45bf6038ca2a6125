"""How long workers may keep attempts, and what becomes of those that they lose."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from agl_core.server import Keys, RolloutQueue
from agl_core.testing import episodes as make
from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.server import Hooks
from agl_core.types import AttemptKey, Ending, RolloutState
from agl_core.wire.workers import (
    CloseRequest,
    HeartbeatRequest,
    HeldAttempt,
    LeaseRequest,
    RewardReport,
)

from ..clock import Clock
from ..posting import said_by_agl

FINISHED = CloseRequest(ending=Ending.FINISHED, result="4")
YEAR = 365 * 86_400.0

KEYS = Keys()


@pytest.fixture
async def clock() -> Clock:
    return Clock(asyncio.get_running_loop())


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def set_wall_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the wall clock wrong by so many seconds; else it goes as the event loop's does."""
    loop = asyncio.get_running_loop()
    started, error = time.time() - loop.time(), 0.0

    def be_wrong_by(seconds: float) -> None:
        nonlocal error
        error = seconds

    monkeypatch.setattr(time, "time", lambda: started + loop.time() + error)
    return be_wrong_by


@contextlib.asynccontextmanager
async def watched(store: object, attempts: int = 3) -> AsyncIterator[RolloutQueue]:
    """A queue whose attempts take 100 seconds and a grace of 30, and whose leases last for 20."""
    queue = RolloutQueue(
        store,
        timeout=100,
        attempts=attempts,
        hook=Hooks(),
        keys=KEYS,
        grace=30,
        heartbeat=5,
        lease=20,  # type: ignore[arg-type]
    )
    watching = asyncio.ensure_future(queue.watch())
    await asyncio.sleep(0)
    yield queue
    watching.cancel()


@pytest.fixture
async def queue(clock: Clock, store: MemoryStore) -> AsyncIterator[RolloutQueue]:
    async with watched(store) as queue:
        yield queue


async def lent(queue: RolloutQueue, worker: str = "w", capacity: int = 1) -> list[AttemptKey]:
    reply = await queue.lease(LeaseRequest(worker=worker, capacity=capacity, wait=0))
    return [AttemptKey(each.rollout, each.attempt) for each in reply.leases]


def beat(queue: RolloutQueue, *keys: AttemptKey, worker: str = "w") -> list[AttemptKey]:
    """Send a heartbeat; returns those that are lost."""
    attempts = [HeldAttempt(**key._asdict(), secret=KEYS.of_lease(key)) for key in keys]
    lost = queue.heartbeat(HeartbeatRequest(worker=worker, attempts=attempts)).lost
    return [AttemptKey(each.rollout, each.attempt) for each in lost]


async def state(store: MemoryStore, id: str = "a") -> RolloutState:
    return (await store.rollout(id)).state


async def test_a_worker_that_beats_keeps_its_attempts_up_to_their_timeout(
    queue: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    await queue.enqueue([make.rollout("a")])
    (key,) = await lent(queue)
    for _ in range(8):
        assert beat(queue, key) == []
        await clock.advance(15)
        assert await state(store) is RolloutState.RUNNING
    assert beat(queue, key) == []
    await clock.advance(15)
    assert await state(store) is RolloutState.QUEUED, "a heartbeat does not reach beyond timeout and grace"
    (attempt,) = await store.attempts("a")
    assert (attempt.ending, attempt.error) == (Ending.LOST, "The worker w did not report within 130 seconds.")


async def test_a_worker_that_stops_beating_loses_them(queue: RolloutQueue, clock: Clock, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout("a")])
    (key,) = await lent(queue)
    beat(queue, key)
    await clock.advance(19)
    assert await state(store) is RolloutState.RUNNING
    await clock.advance(1)
    assert await state(store) is RolloutState.QUEUED
    (attempt,) = await store.attempts("a")
    assert (attempt.ending, attempt.error) == (Ending.LOST, "The worker w sent no heartbeat for 20 seconds.")
    assert await lent(queue, "v") == [AttemptKey("a", 1)]
    assert beat(queue, key) == [key], "its worker is told"


async def test_a_worker_that_never_beats_keeps_them_up_to_their_timeout(
    queue: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    await queue.enqueue([make.rollout("a")])
    await lent(queue)
    await clock.advance(125)
    assert await state(store) is RolloutState.RUNNING
    await clock.advance(5)
    assert await state(store) is RolloutState.QUEUED


async def test_the_first_heartbeat_starts_the_clock_of_all_that_a_worker_holds(
    queue: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    """Also of what it was lent and never heard of."""
    await queue.enqueue([make.rollout(id) for id in "abc"])
    first, _ = await lent(queue, capacity=2)
    await lent(queue, "another")
    assert beat(queue, first) == []
    await clock.advance(10)
    beat(queue, first)
    await clock.advance(11)
    assert [await state(store, id) for id in "abc"] == ["running", "queued", "running"]


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
async def test_leases_do_not_go_by_the_wall_clock(
    jump: float,
    queue: RolloutQueue,
    clock: Clock,
    store: MemoryStore,
    set_wall_clock: Callable[[float], None],
) -> None:
    await queue.enqueue([make.rollout(id) for id in "ab"])
    kept, dropped = await lent(queue, capacity=2)
    beat(queue, kept, dropped)
    await clock.advance(15)
    assert beat(queue, kept) == []
    await clock.advance(4)
    set_wall_clock(jump)
    await clock.advance(1)
    assert [await state(store, id) for id in "ab"] == ["running", "queued"]
    for _ in range(7):
        assert beat(queue, kept) == []
        await clock.advance(15)
    assert await state(store) is RolloutState.RUNNING
    await clock.advance(5)
    assert await state(store) is RolloutState.QUEUED, "its timeout does not go by the wall clock either"


async def test_while_the_store_fails_it_is_asked_now_and_then_and_the_log_is_short(
    queue: RolloutQueue, clock: Clock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    beat(queue, *await lent(queue, capacity=3))
    store.failing = True
    await clock.advance(20)
    for _ in range(15):
        await clock.advance(0.8)
    said = said_by_agl(caplog)
    assert 1 <= said.count("scripted failure") <= 4, said
    assert "Traceback" not in said
    store.failing = False
    for _ in range(3):
        await clock.advance(5)
    assert [await state(store, id) for id in "abc"] == ["queued"] * 3


async def test_a_heartbeat_is_told_what_no_longer_counts(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout(id) for id in "abcd"])
    a, b, c = await lent(queue, capacity=3)
    await queue.cancel(["a"])
    await queue.close_attempt(b, FINISHED)
    unknown = AttemptKey("nobody", 0)
    assert beat(queue, a, b, c, unknown) == [a, unknown], "what it reported itself is not lost"
    queue.close()
    assert queue.heartbeat(HeartbeatRequest(worker="w", attempts=[])).closed


async def test_the_late_result_of_a_lost_attempt_does_not_count(
    queue: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    await queue.enqueue([make.rollout("a")])
    (late,) = await lent(queue)
    beat(queue, late)
    await clock.advance(20)
    (again,) = await lent(queue, "v")
    report = CloseRequest(ending=Ending.FINISHED, result="late", rewards=[RewardReport(value=1.0)])
    assert not (await queue.close_attempt(late, report)).counted
    assert await store.rewards([late]) == await store.rewards([again]) == []
    active = queue.attempt(again)
    assert active is not None
    active.completed_calls = 1
    assert (await queue.close_attempt(again, FINISHED)).counted
    [done] = await queue.done(["a"])
    assert (done.ending, done.counted_attempt) == (Ending.FINISHED, 1)
