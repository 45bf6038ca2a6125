"""A worker keeps what it leased while it lives, lets go of what is lost, waits for its server, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agl_core.client.agent import AgentContext
from agl_core.client.worker import LightningClient, UnreachableError, Worker
from agl_core.errors import ServerError
from agl_core.testing import episodes as make
from agl_core.types import Ending
from agl_core.wire import CLOSE, Answer, Asked, HeartbeatRequest, Lease, LeaseReply, Operation
from agl_server.testing import until

from .road import Road, answer, as_tasks, ask

LEASED = pytest.mark.parametrize("workplace", [{"lease": 2.0, "attempts": 3}], indirect=True)


@contextlib.asynccontextmanager
async def working(
    workplace: Any, agent: Any, kind: type[LightningClient] = LightningClient, **options: Any
) -> AsyncIterator[tuple[Worker, Road, asyncio.Task[None]]]:
    """A worker of this loop, on a road that can be closed."""
    server = workplace.stack.server
    road = Road(server.base_url)
    await road.open()
    async with kind(road.url, options.pop("key", server.worker_key)) as client:
        worker = Worker(client, as_tasks(agent), concurrency=4, **options)
        task = asyncio.create_task(worker.run())
        try:
            yield worker, road, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            road.close()


@pytest.mark.timing
@LEASED
async def test_an_agent_that_blocks_the_loop_loses_no_lease(workplace: Any) -> None:
    async def agent(task_input: Any, context: AgentContext) -> int:
        await ask(context)
        time.sleep(4)  # noqa: ASYNC251
        return context.attempt

    [(rollout, attempt)] = await workplace.run(agent, [0])
    assert (rollout.ending, attempt.result) == (Ending.FINISHED, 0)


@LEASED
async def test_an_attempt_that_no_longer_counts_is_ended(workplace: Any) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        await ask(context)
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return "never"

    worker = workplace.start(agent)
    await workplace.stack.server.queue.enqueue([make.rollout("w0")])
    assert await asyncio.to_thread(started.wait, 20)
    await workplace.stack.server.queue.cancel(["w0"])
    assert await asyncio.to_thread(cancelled.wait, 20)
    await until(lambda: worker.worker.running == 0)
    assert worker.alive


class LosingTheFirstLease(LightningClient):
    """The reply with the first rollouts does not arrive."""

    lost = False

    async def ask(self, operation: Operation[Asked, Answer], body: Asked, lease: Lease | None = None) -> Answer:
        reply = await super().ask(operation, body, lease)
        if isinstance(reply, LeaseReply) and reply.leases and not self.lost:
            self.lost = True
            raise UnreachableError("lost on the way")
        return reply


@pytest.mark.timing
@LEASED
async def test_what_was_lent_in_a_reply_that_never_arrived_is_soon_tried_again(workplace: Any) -> None:
    """The worker sends heartbeats before its first lease, so that no timeout of minutes has to pass."""
    queue = workplace.stack.server.queue
    async with working(workplace, answer, LosingTheFirstLease):
        await queue.enqueue([make.rollout("w0")])
        [done] = await asyncio.wait_for(queue.done(["w0"]), 20)
    assert (done.ending, done.counted_attempt) == (Ending.FINISHED, 1)


async def test_a_server_that_goes_and_comes_back_is_waited_for(
    workplace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    called, go_on = asyncio.Event(), asyncio.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        answer = await ask(context)
        called.set()
        await go_on.wait()
        return answer

    queue = workplace.stack.server.queue
    with caplog.at_level(logging.WARNING, "agl_core.client.worker"):
        async with working(workplace, agent) as (worker, road, task):
            await queue.enqueue([make.rollout("w0")])
            await called.wait()
            road.close()
            await until(lambda: "cannot be reached" in caplog.text)
            go_on.set()
            await until(lambda: worker.endings.total() == 1)
            assert (worker.running, len(queue.running), task.done()) == (1, 1, False)
            await road.open()
            assert (await queue.done(["w0"]))[0].ending is Ending.FINISHED
            await until(lambda: "is back" in caplog.text)


@pytest.mark.timing
@LEASED
@pytest.mark.parametrize("pause", [0.0, 0.3])
async def test_what_ended_is_reported_though_its_lease_is_over(workplace: Any, pause: float) -> None:
    """It ended while the server was away, or just when it is back and a heartbeat is told that the lease is over."""
    called, go_on = asyncio.Event(), asyncio.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        await ask(context)
        if context.attempt > 0:
            return "in time"
        called.set()
        await go_on.wait()
        await asyncio.sleep(pause)
        return "late"

    queue = workplace.stack.server.queue
    async with working(workplace, agent) as (worker, road, _):
        await queue.enqueue([make.rollout("w0")])
        await called.wait()
        await queue.heartbeat(HeartbeatRequest(worker=worker.name, attempts=[]))  # Should its own first one be slow.
        road.close()
        if not pause:
            go_on.set()
            await until(lambda: worker.endings.total() == 1)
        await until(lambda: not queue.running)
        await road.open()
        go_on.set()
        [rollout] = await queue.done(["w0"])
        await until(lambda: worker.running == 0)
    late, counted = await workplace.stack.store.attempts("w0")
    assert late.ending is Ending.LOST
    assert (rollout.counted_attempt, counted.result) == (1, "in time")


async def test_a_worker_that_is_stopped_while_it_reports_tries_once_more(workplace: Any) -> None:
    reporting = asyncio.Event()

    class Slow(LightningClient):
        """The first report takes for ever."""

        async def ask(self, operation: Any, body: Any, lease: Lease | None = None) -> Any:
            if operation is CLOSE and not reporting.is_set():
                reporting.set()
                await asyncio.sleep(3600)
            return await super().ask(operation, body, lease)

    queue = workplace.stack.server.queue
    async with working(workplace, answer, Slow) as (worker, _, task):
        await queue.enqueue([make.rollout("w0")])
        await reporting.wait()
        worker.drain(0)
        await asyncio.wait_for(task, 20)
    [rollout] = await queue.done(["w0"])
    assert (rollout.ending, worker.endings.total()) == (Ending.FINISHED, 1)


async def test_a_server_that_has_moved_is_left(workplace: Any) -> None:
    async with working(workplace, answer, moved=lambda: True) as (_, road, task):
        await until(lambda: workplace.stack.server.queue.waiting)
        road.close()
        await asyncio.wait_for(task, 20)


async def test_a_server_that_refuses_the_key_is_an_error(workplace: Any) -> None:
    async with working(workplace, answer, key="wrong") as (_, _, task):
        with pytest.raises(ServerError, match="401"):
            await asyncio.wait_for(task, 20)


async def test_a_drained_worker_finishes_what_it_can_and_gives_the_rest_back(workplace: Any) -> None:
    begun: list[str] = []
    release = asyncio.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        answer = await ask(context)
        begun.append(context.rollout)
        if context.rollout == "w0":
            await release.wait()
        if (context.rollout, context.attempt) == ("w1", 0):
            await asyncio.sleep(3600)
        return answer

    queue = workplace.stack.server.queue
    async with working(workplace, agent) as (worker, _, task):
        await queue.enqueue([make.rollout("w0"), make.rollout("w1")])
        await until(lambda: len(begun) == 2)
        worker.drain(3600)
        await until(lambda: not queue.waiting)
        await queue.enqueue([make.rollout("w2")])
        release.set()
        assert await queue.done(["w0"])
        assert not task.done()
        worker.drain(3600)  # the second signal
        await asyncio.wait_for(task, 20)
    assert sorted(begun) == ["w0", "w1"]
    [attempt] = await workplace.stack.store.attempts("w1")
    assert attempt.ending is Ending.LOST
    async with working(workplace, agent):
        done = [rollout for id in ("w1", "w2") for rollout in await queue.done([id])]
    assert {(rollout.id, rollout.ending, rollout.counted_attempt) for rollout in done} == {
        ("w1", Ending.FINISHED, 1),
        ("w2", Ending.FINISHED, 0),
    }
