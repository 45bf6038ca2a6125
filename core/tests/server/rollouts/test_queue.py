"""The rollout queue's state machine, durable at each step."""

from __future__ import annotations

import asyncio

import pytest

from agl_core import hookimpl
from agl_core.errors import ServerError, StoreError
from agl_core.plugins import Plugins
from agl_core.server import RolloutQueue
from agl_core.server.keys import Keys
from agl_core.testing import episodes as make
from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.server import Hooks
from agl_core.types import AttemptKey, Ending, RolloutState, ToolStatus
from agl_core.wire.workers import CloseRequest, LeaseReply, RewardReport, ToolResultReport

from ..leasing import CRASHED, FINISHED, lease, leased


async def test_leases_are_first_in_first_out_up_to_capacity(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    reply = await lease(queue, capacity=2)
    assert [each.rollout for each in reply.leases] == ["a", "b"]
    assert [(await store.rollout(id)).state for id in "abc"] == ["running", "running", "queued"]
    assert [each.worker for each in await store.attempts("a")] == ["w"]
    first = reply.leases[0]
    assert (first.task_id, first.task_input, first.task_split) == ("t", {"question": "?"}, "train")
    assert (first.path, first.timeout, first.mode) == ("/rollout/a/attempt/0", 30, "train")
    assert (queue.queued, queue.running) == (1, 2)


async def test_nothing_is_acknowledged_before_it_is_in_the_store(queue: RolloutQueue, store: MemoryStore) -> None:
    for step in (
        lambda: queue.enqueue([make.rollout("a")]),
        lambda: lease(queue),
        lambda: queue.close_attempt(AttemptKey("a", 0), FINISHED),
    ):
        store.writable.clear()
        store.write_waits.clear()
        task = asyncio.ensure_future(step())
        await store.write_waits.wait()
        assert not task.done()
        before = len(store.written)
        store.writable.set()
        await task
        assert len(store.written) > before


async def test_a_lease_waits_for_the_first_rollout(queue: RolloutQueue) -> None:
    waiting = [asyncio.ensure_future(lease(queue, wait=30)) for _ in range(2)]
    await asyncio.sleep(0)
    await queue.enqueue([make.rollout("a")])
    await queue.enqueue([make.rollout("b")])
    assert sorted(reply.leases[0].rollout for reply in await asyncio.gather(*waiting)) == ["a", "b"]


async def test_failed_writes_leave_the_queue_as_it_was(queue: RolloutQueue, store: MemoryStore) -> None:
    store.failing = True
    with pytest.raises(StoreError):
        await queue.enqueue([make.rollout("a")])
    store.failing = False
    await queue.enqueue([make.rollout("a"), make.rollout("b")])
    store.failing = True
    with pytest.raises(StoreError):
        await lease(queue, capacity=2)
    store.failing = False
    reply = await lease(queue, capacity=2)
    assert [(each.rollout, each.attempt) for each in reply.leases] == [("a", 0), ("b", 0)]
    store.failing = True
    with pytest.raises(StoreError):
        await queue.close_attempt(AttemptKey("a", 0), CRASHED)
    store.failing = False
    await queue.close_attempt(AttemptKey("a", 0), CRASHED)
    assert (await lease(queue)).leases[0].attempt == 1


async def test_a_finished_attempt_is_stored_whole(queue: RolloutQueue, store: MemoryStore) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue, calls=1)
    tool_result = ToolResultReport(id="o", tool="add", status=ToolStatus.OK, tool_call_id="c1", arguments={"a": 1})
    request = CloseRequest(
        ending=Ending.FINISHED,
        result={"x": 1},
        tool_results=[tool_result],
        rewards=[RewardReport(name="own", value=0.5), RewardReport(name="own", value=0.25)],
    )
    assert (await queue.close_attempt(key, request)).counted
    [done] = await queue.done(["a"])
    assert (done.state, done.ending, done.counted_attempt) == (RolloutState.DONE, Ending.FINISHED, 0)
    assert await store.rollout("a") == done
    (attempt,) = await store.attempts("a")
    assert (attempt.ending, attempt.result) == (Ending.FINISHED, {"x": 1})
    assert attempt.ended is not None
    assert attempt.ended >= attempt.started
    (stored,) = await store.tool_results([key])
    assert (stored.id, stored.tool, stored.tool_call_id, stored.arguments) == ("o", "add", "c1", {"a": 1})
    (reward,) = await store.rewards([key])
    assert (reward.name, reward.value, reward.source, reward.call) == ("own", 0.75, "agent", None)


async def test_the_same_report_twice_changes_nothing(queue: RolloutQueue, store: MemoryStore, hooks: Hooks) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue, calls=1)
    first, second = await asyncio.gather(*(queue.close_attempt(key, FINISHED) for _ in range(2)))
    written, fired = list(store.written), list(hooks.fired)
    assert first == second == await queue.close_attempt(key, FINISHED)
    assert (store.written, hooks.fired) == (written, fired)
    assert [each.id for each in await queue.done(["a"])] == ["a"]


async def test_who_asks_for_some_gets_those_that_are_done_in_the_order_in_which_they_ended(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout(name) for name in "abcd"])
    a, b, c, _ = [await leased(queue, calls=1) for _ in "abcd"]
    asking = [asyncio.ensure_future(queue.done(ids)) for ids in (["a", "b"], ["d", "b"])]
    for key in (c, b):
        await queue.close_attempt(key, FINISHED)
    assert [[each.id for each in await asked] for asked in asking] == [["b"], ["b"]]
    await queue.close_attempt(a, FINISHED)
    for _ in range(2):
        assert [each.id for each in await queue.done(list("dabca"))] == ["c", "b", "a"]
    assert await queue.done([]) == []


async def test_what_memory_has_forgotten_is_answered_from_the_store(
    queue: RolloutQueue, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.server.queue.MAX_REMEMBERED", 1)
    queue = RolloutQueue(store, timeout=30, attempts=2, hook=Hooks(), keys=Keys())
    await queue.enqueue([make.rollout("a"), make.rollout("b"), make.rollout("c")])
    for _ in range(2):
        await queue.close_attempt(await leased(queue, calls=1), FINISHED)
    assert await queue.done(["c", "a"]) == [await store.rollout("a")]


async def test_the_end_of_the_server_sends_away_who_waits(queue: RolloutQueue) -> None:
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue)
    asking, leasing = asyncio.ensure_future(queue.done(["a"])), asyncio.ensure_future(lease(queue, wait=30))
    await asyncio.sleep(0)
    queue.stop()
    with pytest.raises(ServerError, match="stopping"):
        await asking
    assert await leasing == LeaseReply(leases=[], closed=False), "the run is not over"
    active = queue.attempt(key)
    assert active is not None
    assert not active.closed


@pytest.mark.parametrize("by", ["the same server", "the next server"])
async def test_what_a_trainer_left_is_lost_and_not_tried_again(
    queue: RolloutQueue, store: MemoryStore, by: str
) -> None:
    await queue.enqueue([make.rollout(id) for id in "abc"])
    await queue.enqueue([make.rollout("other", run="another run")])
    done, running = await leased(queue, calls=1), await leased(queue, calls=1)
    await queue.close_attempt(done, FINISHED)
    if by == "the next server":
        queue = RolloutQueue(store, timeout=30, attempts=2, hook=Hooks(), keys=Keys())
        await queue.abandon("run")
        assert (await store.rollout("other")).ending is None
    await queue.abandon("run")
    await queue.cancel(["other"])
    assert {each.id: each.ending for each in await store.rollouts(run="run")} == {
        "a": Ending.FINISHED,
        "b": Ending.LOST,
        "c": Ending.LOST,
    }
    assert (queue.queued, queue.running) == (0, 0)
    assert not (await queue.close_attempt(running, FINISHED)).counted
    [attempt] = await store.attempts("b")
    assert attempt.ending is Ending.LOST


async def test_an_end_that_could_not_be_written_is_not_forgotten(store: MemoryStore, hooks: Hooks) -> None:
    queue = RolloutQueue(store, timeout=0.01, attempts=1, hook=hooks, grace=0, keys=Keys())
    await queue.enqueue([make.rollout("a")])
    key = await leased(queue, calls=1)
    store.failing = True
    with pytest.raises(StoreError):
        await queue.close_attempt(key, FINISHED)
    store.failing = False
    watching = asyncio.ensure_future(queue.watch())
    assert (await queue.done(["a"]))[0].ending is Ending.LOST
    watching.cancel()


async def test_hooks_are_fired_for_each_attempt(queue: RolloutQueue, hooks: Hooks) -> None:
    await queue.enqueue([make.rollout("a")])
    await queue.close_attempt(await leased(queue), CRASHED)
    await queue.close_attempt(await leased(queue, calls=1), FINISHED)
    assert hooks.fired == [
        ("started", "a", 0),
        ("finished", "a", 0, Ending.CRASHED),
        ("started", "a", 1),
        ("finished", "a", 1, Ending.FINISHED),
    ]


async def test_a_hook_that_raises_stops_nothing(store: MemoryStore) -> None:
    class Failing:
        @hookimpl
        def rollout_started(self) -> None:
            raise RuntimeError("a plugin's mistake")

        @hookimpl
        def rollout_finished(self) -> None:
            raise RuntimeError("another one")

    plugins = Plugins()
    plugins.register(Failing(), "failing.py")
    queue = RolloutQueue(store, timeout=30, attempts=2, hook=plugins.hook, keys=Keys())
    await queue.enqueue([make.rollout("a")])
    await queue.close_attempt(await leased(queue, calls=1), FINISHED)
    assert (await queue.done(["a"]))[0].ending is Ending.FINISHED
    assert plugins.hook.failures == {("failing.py", "rollout_started"): 1, ("failing.py", "rollout_finished"): 1}
