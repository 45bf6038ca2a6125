"""The server's port and routes, an engine that comes and goes, and the whole of it over the real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_core.errors import ServerError
from agl_core.protocols import Upstream
from agl_core.server import LightningServer
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Hold
from agl_core.testing.server import Stack, running_stack, until
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Ending, Mode, Run
from agl_core.wire import (
    ACTIVITY,
    HEALTH,
    LEASE,
    OF_WORKERS,
    CloseRequest,
    Empty,
    Health,
    LeaseRequest,
    RewardReport,
)
from agl_core.worker.client import LightningClient, UnreachableError

from .posting import GOOD, HELLO


def management(stack: Stack, key: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{stack.server.base_url}/agl/v1",
        headers={"Authorization": f"Bearer {key or stack.server.worker_key}"},
        trust_env=False,
    )


async def test_a_worker_leases_and_closes_over_the_wire(stack: Stack) -> None:
    await stack.server.queue.enqueue([make.rollout("a")])
    async with LightningClient(stack.server.base_url, stack.server.worker_key) as client:
        reply = await client.ask(LEASE, LeaseRequest(worker="w", capacity=4, wait=30))
        (lease,) = reply.leases
        assert (lease.rollout, lease.mode, lease.task_input) == ("a", Mode.TRAIN, {"question": "?"})
        async with openai.AsyncOpenAI(base_url=f"{stack.server.base_url}{lease.path}/v1", api_key=lease.key) as agent:
            await agent.chat.completions.create(**GOOD)
        request = CloseRequest(ending=Ending.FINISHED, result="4", rewards=[RewardReport(value=1)])
        first, second = [await client.close_attempt(lease, request) for _ in range(2)]
        assert first.counted
        assert second.counted
        assert (await stack.server.queue.done(["a"]))[0].ending is Ending.FINISHED
        secret = stack.server.keys.of_lease(AttemptKey("nobody", 0))
        unknown = lease.model_copy(update={"rollout": "nobody", "secret": secret})
        with pytest.raises(ServerError, match=r"404.*no attempt 0 of rollout nobody"):
            await client.close_attempt(unknown, request)
        stack.server.queue.close()
        assert (await client.ask(LEASE, LeaseRequest(worker="w", capacity=4, wait=30))).closed


async def test_a_worker_that_went_away_is_lent_nothing(stack: Stack) -> None:
    async with management(stack) as client:
        waiting = asyncio.ensure_future(client.post("/leases", json={"worker": "w", "capacity": 1, "wait": 60}))
        await until(lambda: stack.server.queue.waiting == 1)
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: stack.server.queue.waiting == 0)
    await stack.server.queue.enqueue([make.rollout("a")])
    assert stack.server.queue.running == 0
    assert (await stack.server.queue.lease(LeaseRequest(worker="v", capacity=1, wait=0))).leases


async def test_a_taken_port_says_so(stack: Stack) -> None:
    port = int(stack.server.base_url.rpartition(":")[2])
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}.*use port 0"):
        async with running_stack(port=port):
            pass


async def test_stopping_ends_calls_in_flight_and_frees_the_port() -> None:
    async with running_stack() as stack:
        key = await stack.lease()
        hold = Hold()
        stack.upstream.script(hold)
        asking = asyncio.ensure_future(stack.client(key).chat.completions.create(**GOOD))
        await hold.arrived.wait()
        server: LightningServer = stack.server
        await server.stop()
        with pytest.raises(openai.InternalServerError, match="stopping"):
            await asking
        await server.stop()
        hold.release.set()
        async with running_stack(port=int(server.base_url.rpartition(":")[2])):
            pass


async def test_a_call_is_not_answered_once_the_store_was_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.sqlite"
    async with SqliteStore(path) as store, running_stack(store=store) as stack:
        key = await stack.lease()
        await stack.client(key).chat.completions.create(**GOOD)
        path.unlink()
        with pytest.raises(openai.InternalServerError) as refused:
            await stack.client(key).chat.completions.create(**GOOD)
        assert (refused.value.status_code, refused.value.code) == (503, "store_failed")
        async with management(stack, stack.server.keys.of_lease(key)) as http:
            closing = await http.post(f"/rollouts/{key.rollout}/attempts/0/close", json={"ending": "finished"})
        assert closing.status_code == 503
        assert f"its file {path} was removed" in closing.json()["error"]["message"]
    assert f"its file {path} was removed" in caplog.text


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
    server.relay.withdraw()
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
        assert [attempt.rollout for attempt in activity.attempts] == ["a"]
        server.serve(engine(empty.upstream), {})
        assert [lease.rollout for lease in (await waiting).leases] == ["b"]
        await queue.enqueue([make.rollout("c")])
        assert await operator.ask(HEALTH, Empty()) == Health(serving=True, queued=1, running=2, waiting=0, counters={})
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
    assert [rollout.ending for rollout in await empty.store.rollouts()] == [Ending.LOST, Ending.LOST]
    assert server.queue.queued == server.queue.running == 0
    assert await empty.store.runs() == runs
    await server.queue.enqueue([make.rollout("new", restart=1)])
    assert not (await server.queue.lease(ALL)).leases, "its engine does not serve yet"
    server.serve(engine(empty.upstream), {})
    assert [lease.rollout for lease in (await server.queue.lease(ALL)).leases] == ["new"]


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
    own, other = await stack.lease(), await stack.lease()
    keys = stack.server.keys
    everybodys = (keys.operator, keys.worker, keys.of_lease(own), keys.of_lease(other), keys.of_attempt(own), "none")
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


async def test_the_document_names_every_operation_and_body(stack: Stack) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        document = (await http.get(f"{stack.server.base_url}/openapi.json")).json()
    for operation in OF_WORKERS:
        described = document["paths"][operation.path][operation.method.lower()]
        schema = described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert schema.rpartition("/")[2] == operation.reply.__name__
        assert ("requestBody" in described) is operation.has_body
        assert operation.reply.__name__ in document["components"]["schemas"]
