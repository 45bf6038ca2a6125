"""A trainer apart sends more than one request can carry: rollouts arrive in their order, records all or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core.client import BlockingClient, LightningClient, RefusedError, RemoteServer, UnreachableError
from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.server import Stack, running_stack
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Reward, Task
from agl_core.wire.body import MAX_RECORDS, Empty
from agl_core.wire.trainers import BEGIN, PUT_PART, BeginRequest

BEGINNING = BeginRequest(run="run", started=1.0, config=None, resumed_step=None)


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[Stack]:
    """A server that no trainer has spoken to, over the real store."""
    async with (
        ScriptedUpstream(),
        SqliteStore(tmp_path / "store.sqlite") as store,
        running_stack(store=store, upstream=None) as stack,
    ):
        yield stack


@pytest.fixture
async def remote(empty: Stack) -> AsyncIterator[RemoteServer]:
    async with RemoteServer(empty.server.base_url, empty.server.keys.operator) as remote:
        await remote.run.begin(BEGINNING)
        yield remote


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are small, so that there are many."""
    monkeypatch.setattr("agl_core.client.chunks.LARGE", 2000)


def rewards(count: int, value: float = 0.5) -> list[Reward]:
    return [Reward("r", 0, f"n{number}", value, "rule") for number in range(count)]


async def recorded(stack: Stack) -> list[tuple[str, float]]:
    found = await stack.store.rewards([AttemptKey("r", 0)])
    return [(each.name, each.value) for each in found]


async def test_more_than_one_request_can_carry(empty: Stack, remote: RemoteServer) -> None:
    """As large as it is: 80 MiB of tasks."""
    task = Task("t", "x" * (2 << 20))
    rollouts = [make.rollout(f"r{number:02}", task=task) for number in range(40)]
    assert len(rollouts) * len(task.input) > MAX_RECORDS
    await remote.run.queue.enqueue(rollouts)
    assert empty.server.queue.queued == 40
    await remote.run.store.put(*[make.rollout(f"s{number:02}", task=task) for number in range(40)])
    found = [each.id for each in await empty.store.rollouts(run="run")]
    assert sorted(found) == sorted(f"{kind}{number:02}" for kind in "rs" for number in range(40))


async def test_rollouts_are_taken_in_in_their_order(empty: Stack, remote: RemoteServer, small: None) -> None:
    rollouts = [make.rollout(f"r{number:03}", task=Task("t", "x" * (number % 50 * 100))) for number in range(200)]
    for _ in range(2):
        await remote.run.queue.enqueue(rollouts)
    assert empty.server.queue.queued == 200
    assert [each.id for each in await empty.store.rollouts(run="run")] == [each.id for each in rollouts]


async def test_records_are_written_at_once(
    empty: Stack, remote: RemoteServer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[int] = []
    put = empty.store.put

    async def counted(*records: Any) -> None:
        puts.append(len(records))
        await put(*records)

    monkeypatch.setattr(empty.store, "put", counted)
    await remote.run.store.put(*rewards(500))
    assert puts == [500]
    assert await recorded(empty) == [(f"n{number}", 0.5) for number in range(500)]
    with BlockingClient(empty.server.base_url, empty.server.keys.operator) as client:
        await asyncio.to_thread(client.put, rewards(400, 0.75))
    assert puts == [500, 400]
    assert sum(value == 0.75 for _, value in await recorded(empty)) == 400


async def test_if_the_server_forgets_parts_all_are_sent_again(
    empty: Stack, remote: RemoteServer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.client.link._FIRST_DELAY", 0.01)
    ask, sent = LightningClient.ask, 0

    async def ask_a_server_that_forgets(self: LightningClient, operation: Any, body: Any) -> Any:
        nonlocal sent
        sent += operation is PUT_PART
        if operation is PUT_PART and sent == 5:
            await ask(self, BEGIN, BEGINNING)
        return await ask(self, operation, body)

    monkeypatch.setattr(LightningClient, "ask", ask_a_server_that_forgets)
    await remote.run.store.put(*rewards(300))
    assert sent == 16, "twice as many as there are"
    assert await recorded(empty) == [(f"n{number}", 0.5) for number in range(300)]


async def test_one_that_cannot_be_stored_is_named_and_none_is_written(
    empty: Stack, remote: RemoteServer, small: None
) -> None:
    with pytest.raises(StoreRefusedError, match="NUL"):
        await remote.run.store.put(*rewards(300), Reward("\0", 0, "n", 1.0, "rule"))
    assert await recorded(empty) == []


async def test_if_the_store_fails_the_parts_stay_until_they_are_written(
    empty: Stack, remote: RemoteServer, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failures = empty.store.put, 1

    async def fails(*records: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreError("the disk is full")
        await put(*records)

    monkeypatch.setattr(empty.store, "put", fails)
    monkeypatch.setattr("agl_core.client.link._FIRST_DELAY", 0.01)
    await remote.run.store.put(*rewards(300))
    assert len(await recorded(empty)) == 300


async def test_one_record_that_is_too_large_is_named(remote: RemoteServer) -> None:
    with pytest.raises(StoreRefusedError, match=r"Rollout \(id 'r'.*are the limit"):
        await remote.run.store.put(make.rollout("r", task=Task("t", "x" * MAX_RECORDS)))
    with pytest.raises(RefusedError, match="are the limit"):
        await remote.run.queue.enqueue([make.rollout("r", task=Task("t", "x" * MAX_RECORDS))])


async def test_parts_over_http(empty: Stack) -> None:
    url = f"{empty.server.base_url}/agl/v1/store/parts"
    row = ["r", 0, "right", 1.0, "rule", None, 0]
    part: dict[str, Any] = {"put": "p", "number": 0, "records": {"tables": {"rewards": [row]}}}
    headers = {"authorization": f"Bearer {empty.server.keys.operator}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
        assert (await http.post(url, json=part)).status_code == 200
        missing = await http.post(f"{url}/write", json={"put": "p", "count": 2})
        assert (missing.status_code, missing.json()["error"]["code"]) == (409, "parts_missing")
        assert await recorded(empty) == []
        for number, status in ((1, 200), (1, 200), (1024, 422), (-1, 422)):
            assert (await http.post(url, json={**part, "number": number})).status_code == status
        written = [(await http.post(f"{url}/write", json={"put": "p", "count": 2})).status_code for _ in range(2)]
        assert written == [200, 409], "what was written is kept no longer"
        assert await recorded(empty) == [("right", 1.0)]
        for number in range(8):
            await http.post(url, json={**part, "put": str(number)})
        assert (await http.post(f"{url}/write", json={"put": "0", "count": 1})).status_code == 409, "the oldest went"
        assert (await http.post(f"{url}/write", json={"put": "7", "count": 1})).status_code == 200
        await http.post(url, json=part)
        async with LightningClient(empty.server.base_url, empty.server.keys.operator) as client:
            await client.ask(BEGIN, BEGINNING)
        assert (await http.post(f"{url}/write", json={"put": "p", "count": 1})).status_code == 409, "its trainer went"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        assert (await http.post(url, json=part)).status_code == 401


async def test_a_client_of_its_own_is_told_to_try_again(
    empty: Stack, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = LightningClient.ask

    async def lose_parts(self: LightningClient, operation: Any, body: Any) -> Any:
        return Empty() if operation is PUT_PART else await ask(self, operation, body)

    monkeypatch.setattr(LightningClient, "ask", lose_parts)
    async with LightningClient(empty.server.base_url, empty.server.keys.operator) as client:
        with pytest.raises(UnreachableError, match="Send all parts again"):
            await client.put(rewards(300))
