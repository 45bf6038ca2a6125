"""A trainer begins a restart of its run on the server, says where its engine serves, and ends; the next one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from agl_core.protocols import Upstream
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Hold
from agl_core.testing.server import Stack, running_stack, until
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Ending, Run
from agl_core.wire.client import LightningClient, UnreachableError
from agl_core.wire.workers import ACTIVITY, HEALTH, LEASE, Empty, LeaseRequest

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ALL = LeaseRequest(worker="w", capacity=9, wait=0)


def engine(upstream: ScriptedUpstream) -> Upstream:
    return Upstream(urls=(upstream.url,), models={"default": "served"}, api_key="engine-key")


@pytest.fixture
async def empty() -> AsyncIterator[Stack]:
    """A server without an engine."""
    async with ScriptedUpstream() as upstream, running_stack(upstream=None) as stack:
        yield replace(stack, upstream=upstream)


async def call(stack: Stack, key: AttemptKey) -> Any:
    return await stack.client(key).chat.completions.create(model="default", messages=HELLO)


async def test_until_there_is_an_engine_rollouts_wait_and_calls_are_to_be_tried_later(empty: Stack) -> None:
    server, queue = empty.server, empty.server.queue
    server.serve(engine(empty.upstream), {})
    await queue.enqueue([make.rollout("a"), make.rollout("b")])
    [lease] = (await queue.lease(LeaseRequest(worker="w", capacity=1))).leases
    server.withdraw()
    async with httpx.AsyncClient(trust_env=False, headers={"x-api-key": lease.key}) as agent:
        for path, body in (("chat/completions", {"messages": HELLO}), ("messages", {"messages": HELLO})):
            url = f"{server.base_url}{lease.path}/v1/{path}"
            refused = await agent.post(url, json={"model": "default", "max_tokens": 9, **body})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "No engine serves a model now" in refused.text
    waiting = asyncio.ensure_future(queue.lease(LeaseRequest(worker="w", capacity=1, wait=60)))
    await until(lambda: queue.waiting)
    async with LightningClient(server.base_url, server.keys.operator) as operator:
        activity = await operator.ask(ACTIVITY, Empty())
        assert (activity.serving, activity.queued, activity.running, activity.waiting) == (False, 1, 1, 1)
        assert [each.rollout for each in activity.attempts] == ["a"]
        server.serve(engine(empty.upstream), {})
        assert [each.rollout for each in (await waiting).leases] == ["b"]
        assert (await operator.ask(HEALTH, Empty())).serving
    reply = await call(empty, AttemptKey("a", 0))
    assert reply.choices[0].message.content, "the client may try again"


async def test_another_engine_takes_over_and_calls_of_the_first_end(empty: Stack) -> None:
    async with ScriptedUpstream() as second:
        empty.server.serve(engine(empty.upstream), {})
        key = await empty.lease()
        hold = Hold()
        empty.upstream.script(hold)
        asking = asyncio.ensure_future(call(empty, key))
        await hold.arrived.wait()
        empty.server.serve(engine(second), {})
        await call(empty, key)
        assert len(second.received) == 1
        hold.release.set()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_next_restart_ends_what_the_last_one_left(empty: Stack) -> None:
    runs = [Run("run", 0, 1.0, {"name": "run"}, None), Run("run", 1, 2.0, {"name": "run"}, 7)]
    server = empty.server
    await server.begin(runs[0])
    server.serve(engine(empty.upstream), {})
    await server.queue.enqueue([make.rollout("queued"), make.rollout("running")])
    await server.queue.lease(LeaseRequest(worker="w", capacity=1))
    await server.begin(runs[1])
    assert [each.ending for each in await empty.store.rollouts()] == [Ending.LOST, Ending.LOST]
    assert server.queue.queued == server.queue.running == 0
    assert await empty.store.runs() == runs
    await server.queue.enqueue([make.rollout("new", restart=1)])
    assert not (await server.queue.lease(ALL)).leases, "its engine does not serve yet"
    server.serve(engine(empty.upstream), {})
    assert [each.rollout for each in (await server.queue.lease(ALL)).leases] == ["new"]


async def test_the_end_of_the_server_is_not_the_end_of_the_run(empty: Stack) -> None:
    server = empty.server
    async with LightningClient(server.base_url, server.worker_key) as worker:
        leasing = asyncio.ensure_future(worker.ask(LEASE, LeaseRequest(worker="w", capacity=1, wait=60)))
        await until(lambda: server.queue.waiting)
        await server.stop(over=False)
        reply = await leasing
        assert (reply.leases, reply.closed) == ([], False)
        with pytest.raises(UnreachableError):
            await worker.ask(LEASE, ALL)


async def test_each_key_opens_its_own_doors_only(stack: Stack) -> None:
    own = await stack.lease()
    keys = stack.server.keys
    everybodys = (keys.operator, keys.worker, keys.of_lease(own), keys.of_attempt(own), "none")
    close = f"rollouts/{own.rollout}/attempts/0/close"
    doors = {
        ("POST", "leases"): {keys.worker},
        ("POST", "heartbeats"): {keys.worker},
        ("POST", close): {keys.of_lease(own)},
        ("GET", "health"): {keys.worker, keys.operator},
        ("GET", "activity"): {keys.operator},
    }
    async with httpx.AsyncClient(base_url=f"{stack.server.base_url}/agl/v1/", trust_env=False) as http:
        for (method, path), whose in doors.items():
            for key in (*everybodys, keys.operator[:-1], keys.worker + "x"):
                answer = await http.request(method, path, content=b"{", headers={"Authorization": f"Bearer {key}"})
                assert (answer.status_code != 401) is (key in whose), (path, key)
    with pytest.raises(openai.AuthenticationError):
        await stack.client(own, api_key=keys.operator).chat.completions.create(model="default", messages=HELLO)
