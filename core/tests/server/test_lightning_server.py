"""The server's ports, keys and management routes, and the whole of it over the real store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_core.errors import ServerError
from agl_core.server import LightningServer
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Hold
from agl_core.testing.server import Stack, running_stack, until
from agl_core.types import AttemptKey, Ending, Mode
from agl_core.wire.client import LightningClient
from agl_core.wire.workers import LEASE, CloseRequest, LeaseRequest, RewardReport

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {"model": "default", "messages": HELLO}


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


async def test_health_counts(stack: Stack) -> None:
    key = await stack.lease()
    await stack.client(key).chat.completions.create(**GOOD)
    await stack.server.queue.enqueue([make.rollout("waiting")])
    async with management(stack) as client:
        health = (await client.get("/health")).json()
    assert (health["status"], health["queued"], health["running"], health["waiting"]) == ("ok", 1, 1, 0)


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


async def test_everything_is_in_the_real_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    async with SqliteStore(path) as store, running_stack(store=store) as stack:
        keys = [await stack.lease(member=member) for member in range(4)]

        async def act(key: AttemptKey) -> list[str]:
            replies = [await stack.client(key).chat.completions.create(**GOOD, n=2) for _ in range(3)]
            await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED, result=key.rollout))
            return [reply.id for reply in replies]

        acknowledged = dict(zip(keys, await asyncio.gather(*(act(key) for key in keys)), strict=True))
    async with SqliteStore(path, read_only=True) as store:
        for key, ids in acknowledged.items():
            calls = await store.calls([key])
            assert [call.id for call in calls] == ids
            assert [len(call.choices) for call in calls] == [2, 2, 2]
            assert all(c.response_ids is not None and c.logprobs is not None for call in calls for c in call.choices)
            rollout = await store.rollout(key.rollout)
            assert (rollout.ending, rollout.counted_attempt) == (Ending.FINISHED, 0)


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
