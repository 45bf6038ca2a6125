"""The rollout queue: leases, heartbeats, how attempts end, and which rollouts are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import ANY, Mock, call, create_autospec

import pytest
from memory_store import MemoryStore

from agl_core.apis.errors import no_upstream
from agl_core.errors import ServerError, StoreError
from agl_core.hooks import rollout_finished, rollout_started
from agl_core.plugins import Plugins, RunHooks
from agl_core.testing import episodes as make
from agl_core.types import AttemptKey, Ending, RolloutState, Source, ToolResult, ToolStatus
from agl_core.wire import CloseRequest, HeartbeatRequest, HeldAttempt, LeaseReply, LeaseRequest, RewardReport
from agl_server.http.keys import Keys
from agl_server.queue import RolloutQueue

from .server_aids import Clock, log_of_agl, open_attempt

FINISHED, CRASHED = CloseRequest(ending=Ending.FINISHED, result="4"), CloseRequest(ending=Ending.CRASHED, error="Boom")
KEYS = Keys()


@pytest.fixture
def hooks() -> Mock:
    """Stands for the hooks of plugins."""
    hooks: Mock = create_autospec(RunHooks, instance=True)
    return hooks


@pytest.fixture
def queue(store: MemoryStore, hooks: Mock) -> RolloutQueue:
    """Attempts take 100 seconds and a grace of 30, and leases last for 20."""
    return RolloutQueue(store, timeout=100, attempts=2, hook=hooks, keys=KEYS, grace=30, lease=20)


async def lease(queue: RolloutQueue, capacity: int = 1, wait: float = 0, worker: str = "w") -> LeaseReply:
    return await queue.lease(LeaseRequest(worker=worker, capacity=capacity, wait=wait))


async def lease_keys(queue: RolloutQueue, worker: str = "w", capacity: int = 1) -> list[AttemptKey]:
    reply = await lease(queue, capacity, 0, worker)
    return [AttemptKey(leased.rollout, leased.attempt) for leased in reply.leases]


async def lease_one(queue: RolloutQueue, *, calls: int = 0, overflows: int = 0) -> AttemptKey:
    """Lease one and let it have made some calls."""
    (key,) = await lease_keys(queue)
    attempt = open_attempt(queue, key)
    attempt.started_calls, attempt.completed_calls, attempt.context_overflows = calls + overflows, calls, overflows
    return key


async def test_a_lease_waits_for_the_first_rollout_or_the_end_of_the_run(queue: RolloutQueue) -> None:
    waiting = [asyncio.ensure_future(lease(queue, wait=30)) for _ in range(3)]
    await asyncio.sleep(0)
    await queue.enqueue([make.rollout("a")])
    await queue.enqueue([make.rollout("b")])
    assert {reply.leases[0].rollout for reply in await asyncio.gather(*waiting[:2])} == {"a", "b"}
    queue.close()
    assert (await asyncio.wait_for(waiting[2], 10)).closed


async def test_leases_are_first_in_first_out_up_to_capacity(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    reply = await lease(queue, capacity=2)
    assert [lease.rollout for lease in reply.leases] == ["a", "b"]
    assert [(await store.rollout(id)).state for id in "abc"] == ["running", "running", "queued"]
    assert [attempt.worker for attempt in await store.attempts("a")] == ["w"]
    first = reply.leases[0]
    assert (first.task_id, first.task_input, first.task_split) == ("t", {"question": "?"}, "train")
    assert (first.path, first.timeout, first.mode) == ("/rollout/a/attempt/0", 100, "train")
    assert (len(queue.running), await store.leases()) == (2, (1, {("a", 0): 0, ("b", 0): 0}))


async def test_a_finished_attempt_is_stored_whole(queue: RolloutQueue, store: MemoryStore, hooks: Mock) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await lease_one(queue, calls=1)
    tool_result = ToolResult("o", "", 0, "add", ToolStatus.OK, "c1", {"a": 1}, source=Source.CONVERSATION)
    request = CloseRequest(
        ending=Ending.FINISHED,
        result={"x": 1},
        tool_results=[tool_result],
        rewards=[RewardReport(name="own", value=0.5), RewardReport(name="own", value=0.25)],
    )
    first, second = await asyncio.gather(*(queue.close_attempt(key, request) for _ in range(2)))
    written = list(store.written)
    assert first == second == await queue.close_attempt(key, request)
    assert first.counted
    assert store.written == written, "the same report again changes nothing"
    [done], (attempt,) = await queue.done(["a"]), await store.attempts("a")
    assert hooks.mock_calls == [
        call.call(rollout_started, rollout=ANY, attempt=0),
        call.call(rollout_finished, rollout=done, attempt=attempt),
    ]
    assert (done.state, done.ending, done.counted_attempt) == (RolloutState.DONE, Ending.FINISHED, 0)
    assert (attempt.ending, attempt.result) == (Ending.FINISHED, {"x": 1})
    assert attempt.ended >= attempt.started
    (stored,) = await store.tool_results([key])
    assert (stored.id, stored.tool, stored.tool_call_id, stored.arguments) == ("o", "add", "c1", {"a": 1})
    assert stored.source is Source.ADAPTER, "whatever the agent's side claims"
    (reward,) = await store.rewards([key])
    assert (reward.name, reward.value, reward.source, reward.call) == ("own", 0.75, "agent", None)
    remembered = queue.attempts[key]
    assert remembered.record.ending is Ending.FINISHED
    assert (remembered.record.result, remembered.rollout.task.input) == (None, None), "only the store keeps those"


async def test_an_end_that_could_not_be_written_is_reported_again(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await lease_one(queue)
    store.failing = True
    with pytest.raises(StoreError):
        await queue.close_attempt(key, CRASHED)
    store.failing = False
    await queue.close_attempt(key, CRASHED)
    assert await lease_keys(queue) == [("a", 1)]


async def test_of_those_asked_for_those_that_are_done_come_in_the_order_of_the_queue(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout(name) for name in "abcd"])
    a, b, c, _ = [await lease_one(queue, calls=1) for _ in "abcd"]
    asking = [asyncio.ensure_future(queue.done(ids)) for ids in (["a", "b"], ["d", "b"])]
    for key in (c, b):
        await queue.close_attempt(key, FINISHED)
    assert [[rollout.id for rollout in await waiting] for waiting in asking] == [["b"], ["b"]]
    await queue.close_attempt(a, FINISHED)
    for _ in range(2):
        assert [rollout.id for rollout in await queue.done(list("dabca"))] == ["a", "b", "c"]
    assert await queue.done([]) == []


async def test_what_memory_has_forgotten_is_answered_from_the_store(
    queue: RolloutQueue, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory forgets once too many have ended since, or the server was restarted."""
    monkeypatch.setattr("agl_server.queue.MAX_REMEMBERED", 1)
    await queue.enqueue([make.rollout("a"), make.rollout("b"), make.rollout("c")])
    first, second = [await lease_one(queue, calls=1) for _ in range(2)]
    for key in (first, second):
        await queue.close_attempt(key, FINISHED)
    restarted = RolloutQueue(store, timeout=30, attempts=2, hook=Plugins().hook, keys=KEYS)
    for answering in (queue, restarted):
        assert await answering.done(["a"]) == [await store.rollout("a")]
        assert (await answering.close_attempt(first, FINISHED)).counted
        with pytest.raises(ServerError, match="no attempt 3 of rollout a"):
            await answering.close_attempt(AttemptKey("a", 3), FINISHED)


async def test_the_end_of_the_server_sends_away_who_waits(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout("a")])
    asking = asyncio.ensure_future(queue.done(["a"]))
    await asyncio.sleep(0)
    queue.stop()
    with pytest.raises(ServerError, match="stopping"):
        await asking


async def test_what_a_trainer_left_is_lost_for_good(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    await queue.enqueue([make.rollout("other", run="another run")])
    done, running = await lease_one(queue, calls=1), await lease_one(queue, calls=1)
    await queue.close_attempt(done, FINISHED)
    queue = RolloutQueue(store, timeout=30, attempts=2, hook=Plugins().hook, keys=KEYS)  # The next server's.
    await queue.abandon("run")
    assert [(rollout.id, rollout.ending) for rollout in await store.rollouts()] == [
        ("a", Ending.FINISHED), ("b", Ending.LOST), ("c", Ending.LOST), ("other", None)
    ]  # fmt: skip
    assert await store.leases() == (1, {})
    assert not (await queue.close_attempt(running, FINISHED)).counted
    [attempt] = await store.attempts("b")
    assert attempt.ending is Ending.LOST


@pytest.mark.parametrize(
    ("reported", "calls", "overflows", "was_away", "ending", "again"),
    [
        (Ending.FINISHED, 1, 0, False, Ending.FINISHED, False),
        (Ending.FINISHED, 0, 0, False, Ending.NO_CALL, False),
        (Ending.CRASHED, 0, 0, False, Ending.CRASHED, True),
        (Ending.TIMED_OUT, 0, 0, False, Ending.TIMED_OUT, True),
        (Ending.LOST, 0, 0, False, Ending.LOST, True),
        (Ending.LOST, 1, 0, False, Ending.LOST, True),
        # An attempt in which the policy acted is data, unless what broke it may have been ours.
        (Ending.CRASHED, 1, 0, False, Ending.CRASHED, False),
        (Ending.TIMED_OUT, 1, 0, False, Ending.TIMED_OUT, False),
        (Ending.FINISHED, 1, 0, True, Ending.LOST, True),
        (Ending.CRASHED, 1, 0, True, Ending.LOST, True),
        (Ending.TIMED_OUT, 1, 0, True, Ending.LOST, True),
        (Ending.CRASHED, 0, 1, False, Ending.CONTEXT_OVERFLOW, False),
        (Ending.CRASHED, 2, 1, False, Ending.CONTEXT_OVERFLOW, False),
        (Ending.FINISHED, 0, 1, False, Ending.CONTEXT_OVERFLOW, False),
        (Ending.FINISHED, 1, 1, False, Ending.FINISHED, False),
    ],
)
async def test_how_an_attempt_ends_and_whether_its_rollout_is_tried_again(
    queue: RolloutQueue,
    store: MemoryStore,
    reported: Ending,
    calls: int,
    overflows: int,
    was_away: bool,
    ending: Ending,
    again: bool,
) -> None:
    await queue.enqueue([make.rollout("a"), make.rollout("b")])
    key = await lease_one(queue, calls=calls, overflows=overflows)
    if was_away:
        open_attempt(queue, key).count_failure(no_upstream())
    report = CloseRequest(ending=reported, error="Boom")
    assert (await queue.close_attempt(key, report)).counted is not again
    [attempt] = await store.attempts("a")
    assert attempt.ending is ending
    assert (attempt.error or "Boom").endswith("Boom") or ending is Ending.NO_CALL
    written = list(store.written)
    assert not (await queue.close_attempt(key, CloseRequest(ending=Ending.CANCELLED))).counted, "it changed its mind"
    assert store.written == written
    if again:
        assert (await store.rollout("a")).state is RolloutState.QUEUED
        second = await lease_one(queue, calls=calls, overflows=overflows)
        assert second == AttemptKey("a", 1), "a rollout that is tried again goes before new ones"
        assert (await queue.close_attempt(second, report)).counted, "the budget is used up"
    [done] = await queue.done(["a"])
    assert done.counted_attempt == int(again)


async def test_cancel_ends_queued_and_running_rollouts(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    key = await lease_one(queue, calls=1)
    await queue.cancel(["a", "b", "unknown"])
    done = await queue.done(["a", "b"])
    assert {rollout.id: (rollout.ending, rollout.counted_attempt) for rollout in done} == {
        "a": (Ending.CANCELLED, 0),
        "b": (Ending.CANCELLED, None),
    }
    assert (await store.rollout("b")).state is RolloutState.DONE
    assert open_attempt(queue, key).closed
    assert not (await queue.close_attempt(key, FINISHED)).counted
    assert (await lease(queue, capacity=9)).leases[0].rollout == "c"


async def test_cancel_reaches_what_is_about_to_be_tried_again(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await lease_one(queue)
    store.writable.clear()
    closing = asyncio.ensure_future(queue.close_attempt(key, CRASHED))
    await store.write_waits.wait()
    cancelling = asyncio.ensure_future(queue.cancel(["a"]))
    await asyncio.sleep(0)
    store.writable.set()
    await asyncio.gather(closing, cancelling)
    assert (await queue.done(["a"]))[0].ending is Ending.CANCELLED
    assert (queue.running, await store.leases()) == ({}, (0, {}))


# Below, the loop's time stands still unless a test puts it forward, and the queue watches its leases.


@pytest.fixture
async def clock() -> Clock:
    return Clock(asyncio.get_running_loop())


@pytest.fixture
async def watched(clock: Clock, queue: RolloutQueue) -> AsyncIterator[RolloutQueue]:
    watching = asyncio.ensure_future(queue.watch())
    await asyncio.sleep(0)
    yield queue
    watching.cancel()
    await asyncio.wait([watching])


async def send_heartbeat(queue: RolloutQueue, *keys: AttemptKey) -> list[AttemptKey]:
    """Send a heartbeat; returns those that are lost."""
    attempts = [HeldAttempt(**key._asdict(), secret=KEYS.of_lease(key)) for key in keys]
    lost = (await queue.heartbeat(HeartbeatRequest(worker="w", attempts=attempts))).lost
    return [AttemptKey(attempt.rollout, attempt.attempt) for attempt in lost]


async def states(store: MemoryStore, ids: str = "a") -> list[RolloutState]:
    return [(await store.rollout(id)).state for id in ids]


@pytest.mark.parametrize("beats", [True, False], ids=["beats", "never beats"])
async def test_a_worker_keeps_its_attempts_up_to_their_timeout(
    watched: RolloutQueue, clock: Clock, store: MemoryStore, beats: bool
) -> None:
    await watched.enqueue([make.rollout("a")])
    (key,) = await lease_keys(watched)
    for _ in range(8):
        assert not beats or await send_heartbeat(watched, key) == []
        await clock.advance(15)
        assert await states(store) == ["running"]
    assert not beats or await send_heartbeat(watched, key) == []
    await clock.advance(15)
    assert await states(store) == ["queued"], "a heartbeat does not reach beyond timeout and grace"
    (attempt,) = await store.attempts("a")
    assert (attempt.ending, attempt.error) == (Ending.LOST, "The worker w did not report within 130 seconds.")


async def test_what_a_worker_that_stops_beating_loses_counts_no_more(
    watched: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    await watched.enqueue([make.rollout("a")])
    (late,) = await lease_keys(watched)
    await send_heartbeat(watched, late)
    await clock.advance(19)
    assert await states(store) == ["running"]
    await clock.advance(2)
    assert await states(store) == ["queued"]
    (attempt,) = await store.attempts("a")
    assert (attempt.ending, attempt.error) == (Ending.LOST, "The worker w sent no heartbeat for 20 seconds.")
    assert await send_heartbeat(watched, late) == [late], "its worker is told"
    again = await lease_one(watched, calls=1)
    assert again == AttemptKey("a", 1)
    report = CloseRequest(ending=Ending.FINISHED, result="late", rewards=[RewardReport(value=1.0)])
    assert not (await watched.close_attempt(late, report)).counted
    assert await store.rewards([late]) == await store.rewards([again]) == []
    assert (await watched.close_attempt(again, FINISHED)).counted
    [done] = await watched.done(["a"])
    assert (done.ending, done.counted_attempt) == (Ending.FINISHED, 1)


async def test_the_first_heartbeat_starts_the_clock_of_all_that_a_worker_holds(
    watched: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    """The clock also runs for attempts of which the worker never heard."""
    await watched.enqueue([make.rollout(id) for id in "abc"])
    first, _ = await lease_keys(watched, capacity=2)
    await lease_keys(watched, "another")
    assert await send_heartbeat(watched, first) == []
    await clock.advance(10)
    await send_heartbeat(watched, first)
    await clock.advance(12)
    assert await states(store, "abc") == ["running", "queued", "running"]


async def test_while_the_store_fails_it_is_asked_now_and_then_and_the_log_is_short(
    watched: RolloutQueue, clock: Clock, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.enqueue([make.rollout(id) for id in "abc"])
    await send_heartbeat(watched, *await lease_keys(watched, capacity=3))
    store.failing = True
    await clock.advance(35)
    log = log_of_agl(caplog)
    assert 1 <= log.count("scripted failure") <= 4, log
    assert "Traceback" not in log
    store.failing = False
    await clock.advance(5)
    assert await states(store, "abc") == ["running"] * 3, "until now they could not be renewed"
    await clock.advance(22)
    assert await states(store, "abc") == ["queued"] * 3


async def test_a_heartbeat_is_told_what_no_longer_counts(watched: RolloutQueue) -> None:
    await watched.enqueue([make.rollout(id) for id in "abcd"])
    a, b, c = await lease_keys(watched, capacity=3)
    await watched.cancel(["a"])
    await watched.close_attempt(b, FINISHED)
    unknown = AttemptKey("nobody", 0)
    assert await send_heartbeat(watched, a, b, c, unknown) == [a, unknown], "what it reported itself is not lost"
    watched.close()
    assert (await watched.heartbeat(HeartbeatRequest(worker="w", attempts=[]))).closed


# Two servers over one store.


@pytest.fixture
async def other(clock: Clock, store: MemoryStore) -> AsyncIterator[RolloutQueue]:
    """The queue of another server."""
    queue = RolloutQueue(store, timeout=100, attempts=2, hook=Plugins().hook, keys=KEYS, grace=30, lease=20)
    watching = asyncio.ensure_future(queue.watch())
    yield queue
    watching.cancel()
    await asyncio.wait([watching])


async def test_what_a_dead_server_leased_is_tried_again_by_another_and_its_own_end_comes_too_late(
    queue: RolloutQueue, other: RolloutQueue, clock: Clock, store: MemoryStore
) -> None:
    """It was only slow: it does not look into the store, and no worker reaches it."""
    await queue.enqueue([make.rollout("a")])
    (late,) = await lease_keys(queue)
    await send_heartbeat(queue, late)
    await clock.advance(19)
    assert await send_heartbeat(other, late) == [], "a heartbeat may reach any server"
    await clock.advance(19)
    assert await states(store) == ["running"]
    await clock.advance(3)
    assert await lease_keys(other) == [("a", 1)]
    assert await send_heartbeat(queue, late) == [late]
    assert not (await queue.close_attempt(late, FINISHED)).counted
    assert queue.attempts[late].record.ending is Ending.LOST
    assert (await store.rollout("a")).state is RolloutState.RUNNING
    other.attempts[AttemptKey("a", 1)].completed_calls = 1
    assert (await other.close_attempt(AttemptKey("a", 1), FINISHED)).counted


async def test_a_server_sees_what_another_one_queues_takes_away_and_ends(
    watched: RolloutQueue, other: RolloutQueue, clock: Clock
) -> None:
    leasing = asyncio.ensure_future(lease(watched, wait=30))
    await asyncio.sleep(0)
    await other.enqueue([make.rollout("a")])
    await clock.advance(1)
    assert (await leasing).leases[0].rollout == "a"
    waiting = asyncio.ensure_future(watched.done(["a"]))
    await other.cancel(["a"])
    await clock.advance(1)
    assert [rollout.ending for rollout in await waiting] == [Ending.CANCELLED]
    assert watched.attempts[AttemptKey("a", 0)].closed, "its calls count no more"
    assert not watched.running
