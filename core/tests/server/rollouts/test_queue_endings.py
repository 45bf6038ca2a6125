"""How attempts end, and which rollouts are tried again."""

from __future__ import annotations

import asyncio

import pytest

from agl_core.errors import ServerError
from agl_core.server import RolloutQueue
from agl_core.server.errors import no_upstream
from agl_core.server.keys import Keys
from agl_core.testing import episodes as make
from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.server import Hooks
from agl_core.types import AttemptKey, Ending, RolloutState
from agl_core.wire.workers import CloseRequest

from ..leasing import CRASHED, FINISHED, lease, leased


@pytest.mark.parametrize("ending", [Ending.CRASHED, Ending.TIMED_OUT])
async def test_an_agent_that_broke_while_its_server_was_away_is_tried_again(
    queue: RolloutQueue, store: MemoryStore, ending: Ending
) -> None:
    """It had made calls, so it would be data; but what broke it may have been ours."""
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue, calls=1)
    active = queue.attempt(key)
    assert active is not None
    active.count_failure(no_upstream())
    assert not (await queue.close_attempt(key, CloseRequest(ending=ending, error="Boom"))).counted
    [attempt] = await store.attempts("a")
    assert attempt.ending is Ending.LOST
    assert attempt.error is not None
    assert attempt.error.endswith("Boom")


async def test_a_worker_that_changes_its_mind_is_not_heard(queue: RolloutQueue, store: MemoryStore) -> None:
    """Also where its first report had the rollout tried again."""
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue)
    await queue.close_attempt(key, CRASHED)
    written = list(store.written)
    assert not (await queue.close_attempt(key, FINISHED)).counted
    assert store.written == written


async def test_an_attempt_that_ended_before_a_restart_is_answered_from_the_store(
    queue: RolloutQueue, store: MemoryStore
) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue, calls=1)
    await queue.close_attempt(key, FINISHED)
    restarted = RolloutQueue(store, timeout=30, attempts=2, hook=Hooks(), keys=Keys())
    assert (await restarted.close_attempt(key, FINISHED)).counted
    with pytest.raises(ServerError, match="no attempt 3 of rollout a"):
        await restarted.close_attempt(AttemptKey("a", 3), FINISHED)


@pytest.mark.parametrize("ending", [Ending.CRASHED, Ending.TIMED_OUT, Ending.LOST])
async def test_tried_again_if_no_call_completed(queue: RolloutQueue, store: MemoryStore, ending: Ending) -> None:
    await queue.enqueue([make.rollout("a"), make.rollout("b")])
    assert not (await queue.close_attempt(await leased(queue), CloseRequest(ending=ending))).counted
    assert (await store.rollout("a")).state is RolloutState.QUEUED
    second = await leased(queue)
    assert second == AttemptKey("a", 1), "a rollout that is tried again goes before new ones"
    assert (await queue.close_attempt(second, CloseRequest(ending=ending))).counted, "the budget is used up"
    [done] = await queue.done(["a"])
    assert (done.ending, done.counted_attempt) == (ending, 1)


@pytest.mark.parametrize("ending", [Ending.CRASHED, Ending.TIMED_OUT])
async def test_an_attempt_in_which_the_policy_acted_is_data(queue: RolloutQueue, ending: Ending) -> None:
    await queue.enqueue([make.rollout("a")])
    assert (await queue.close_attempt(await leased(queue, calls=1), CloseRequest(ending=ending))).counted
    assert (await queue.done(["a"]))[0].counted_attempt == 0


async def test_finished_without_a_call_says_how_to_mend_it(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout("a")])
    await queue.close_attempt(await leased(queue), FINISHED)
    assert (await queue.done(["a"]))[0].ending is Ending.NO_CALL
    (attempt,) = await store.attempts("a")
    assert attempt.error is not None
    assert "OPENAI_BASE_URL" in attempt.error
    assert "context.base_url" in attempt.error


@pytest.mark.parametrize(("request_", "calls"), [(CRASHED, 0), (CRASHED, 2), (FINISHED, 0)])
async def test_context_overflow_is_an_ending_of_its_own(
    queue: RolloutQueue, request_: CloseRequest, calls: int
) -> None:
    await queue.enqueue([make.rollout("a")])
    await queue.close_attempt(await leased(queue, calls=calls, overflows=1), request_)
    assert (await queue.done(["a"]))[0].ending is Ending.CONTEXT_OVERFLOW


async def test_an_agent_that_recovered_from_an_overflow_finished(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout("a")])
    await queue.close_attempt(await leased(queue, calls=1, overflows=1), FINISHED)
    assert (await queue.done(["a"]))[0].ending is Ending.FINISHED


async def test_cancel_ends_queued_and_running_rollouts(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    key = await leased(queue, calls=1)
    await queue.cancel(["a", "b", "unknown"])
    done = await queue.done(["a", "b"])
    assert {each.id: (each.ending, each.counted_attempt) for each in done} == {
        "a": (Ending.CANCELLED, 0),
        "b": (Ending.CANCELLED, None),
    }
    assert (await store.rollout("b")).state is RolloutState.DONE
    attempt = queue.attempt(key)
    assert attempt is not None
    assert attempt.closed
    assert not (await queue.close_attempt(key, FINISHED)).counted
    assert (await lease(queue, capacity=9)).leases[0].rollout == "c"


async def test_cancel_reaches_a_rollout_that_is_about_to_be_tried_again(
    queue: RolloutQueue, store: MemoryStore
) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue)
    store.writable.clear()
    closing = asyncio.ensure_future(queue.close_attempt(key, CRASHED))
    await store.write_waits.wait()
    cancelling = asyncio.ensure_future(queue.cancel(["a"]))
    await asyncio.sleep(0)
    store.writable.set()
    await asyncio.gather(closing, cancelling)
    assert (await queue.done(["a"]))[0].ending is Ending.CANCELLED
    assert queue.queued == queue.running == 0
