"""Which requests are one call, and what becomes of calls that outlive their attempt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from agl_core.testing.scripts import Drop, Fail, Hold, Say
from agl_core.testing.server import Stack, until
from agl_core.types import Call, Ending
from agl_core.wire.workers import CloseRequest

from ..posting import clients_waiting, post

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {"model": "default", "messages": HELLO}


async def test_the_clients_retry_of_a_failed_call_is_one_call(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Fail(500), Drop(), Say("at last"))
    reply = await stack.client(key, max_retries=2).chat.completions.create(**GOOD)
    assert reply.choices[0].message.content == "at last"
    (call,) = await stack.calls(key)
    assert call.sequence == 0
    assert len({received.body["seed"] for received in stack.upstream.received}) == 1
    assert len(stack.upstream.received) == 3
    await stack.client(key).chat.completions.create(**GOOD)
    assert [call.sequence for call in await stack.calls(key)] == [0, 1]


async def test_a_retry_of_a_call_in_flight_joins_it(stack: Stack) -> None:
    """The client gave up waiting and asks again; the call it gave up was never cancelled."""
    key = await stack.lease()
    hold = Hold(Say("slow"))
    stack.upstream.script(hold)
    client = stack.client(key, max_retries=3, timeout=2)
    asking = asyncio.ensure_future(client.chat.completions.create(**GOOD))
    await hold.arrived.wait()
    await until(lambda: clients_waiting(stack, key) > 1)
    hold.release.set()
    assert (await asking).choices[0].message.content == "slow"
    assert len(stack.upstream.received) == 1
    assert len(await stack.calls(key)) == 1


async def test_a_retry_of_a_finished_call_gets_the_stored_reply(stack: Stack) -> None:
    key = await stack.lease()
    url, body = f"{stack.url(key)}/chat/completions", json.dumps(GOOD).encode()
    first = await post(stack, url, body)
    again = await post(stack, url, body, **{"x-stainless-retry-count": "1"})
    assert again.json() == first.json()
    assert len(await stack.calls(key)) == 1
    other = await post(stack, url, body + b" ", **{"x-stainless-retry-count": "1"})
    assert other.json()["id"] != first.json()["id"], "another body is another call"


async def test_equal_requests_without_a_marker_are_two_calls(stack: Stack) -> None:
    key = await stack.lease()
    url, body = f"{stack.url(key)}/chat/completions", json.dumps(GOOD).encode()
    replies = [await post(stack, url, body, **{"x-stainless-retry-count": "0"}) for _ in range(2)]
    assert replies[0].json()["id"] != replies[1].json()["id"]
    retried = [await post(stack, url, body, **{"x-stainless-retry-count": "1"}) for _ in range(2)]
    assert [each.json()["id"] for each in retried] == [each.json()["id"] for each in replies]
    assert len(await stack.calls(key)) == 2


@pytest.mark.parametrize(("limit", "value"), [("MAX_KEPT", 2), ("MAX_KEPT_BYTES", 2500)])
async def test_replies_are_kept_for_the_latest_calls(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(f"agl_core.server.answered.{limit}", value)
    key = await stack.lease()
    stack.upstream.script(*(Say(1000 * "x") for _ in range(10)))

    async def ask(number: int, tries: int = 0) -> str:
        body = json.dumps({**GOOD, "user": str(number)}).encode()
        headers = {"x-stainless-retry-count": str(tries)}
        reply = await post(stack, f"{stack.url(key)}/chat/completions", body, **headers)
        return str(reply.json()["id"])

    ids = [await ask(number) for number in range(6)]
    assert await ask(5, tries=1) == ids[5]
    assert await ask(0, tries=1) != ids[0], "asked so late it is a call of its own"


async def test_a_call_that_could_not_be_recorded_is_made_again(stack: Stack) -> None:
    key = await stack.lease()
    stack.store.failing = True
    with pytest.raises(openai.InternalServerError):
        await stack.client(key).chat.completions.create(**GOOD)
    stack.store.failing = False
    reply = await stack.client(key, max_retries=0).chat.completions.create(
        **GOOD, extra_headers={"x-stainless-retry-count": "1"}
    )
    (call,) = await stack.calls(key)
    assert (call.id, call.sequence) == (reply.id, 0)


async def test_a_client_that_hangs_up_does_not_end_the_call(stack: Stack) -> None:
    key = await stack.lease()
    hold = Hold()
    stack.upstream.script(hold)
    asking = asyncio.ensure_future(stack.client(key).chat.completions.create(**GOOD))
    await hold.arrived.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    hold.release.set()
    await until(lambda: any(isinstance(record, Call) for record in stack.store.written))
    assert [call.late for call in await stack.calls(key)] == [False]


async def test_a_call_that_ends_after_its_attempt_is_late(stack: Stack) -> None:
    key = await stack.lease()
    hold = Hold()
    await stack.client(key).chat.completions.create(**GOOD)
    stack.upstream.script(hold)
    asking = asyncio.ensure_future(stack.client(key).chat.completions.create(**GOOD))
    await hold.arrived.wait()
    assert (await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.TIMED_OUT))).counted
    hold.release.set()
    with pytest.raises(openai.APIStatusError, match="is closed") as raised:
        await asking
    assert raised.value.status_code == 410
    assert [call.late for call in await stack.calls(key)] == [False, True]
    with pytest.raises(openai.APIStatusError, match="is closed"):
        await stack.client(key).chat.completions.create(**GOOD)
    assert len(stack.upstream.received) == 2


async def test_closing_waits_for_the_call_that_is_being_written(stack: Stack) -> None:
    """It completed, so the attempt counts and is not tried again."""
    key = await stack.lease()
    stack.store.writable.clear()
    asking = asyncio.ensure_future(stack.client(key).chat.completions.create(**GOOD))
    await stack.store.write_waits.wait()
    closing = asyncio.ensure_future(
        stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.CRASHED, error="x"))
    )
    await asyncio.sleep(0)
    stack.store.writable.set()
    await asking
    assert (await closing).counted
    assert [call.late for call in await stack.calls(key)] == [False]
