"""Replies that reach no client, because it gave up. They stay recorded, and do not count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

import agl_core
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.testing.scripts import Hold, Raw, Say
from agl_core.testing.server import RunningAttempt, Stack, until
from agl_core.types import CreditKind, DropReason, Episode

from ..posting import clients_waiting

QUESTION: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def attempt(stack: Stack) -> AsyncIterator[RunningAttempt]:
    attachment = agl_core.attach([])
    yield await stack.attempt()
    attachment.detach()


async def ask(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    return await client.chat.completions.create(model="default", messages=QUESTION, **asked)


async def recorded(attempt: RunningAttempt, *undelivered: bool) -> None:
    """Wait until the calls are recorded like this, in the order of their starts."""
    async with asyncio.timeout(20):
        while [call.undelivered for call in await attempt.calls()] != list(undelivered):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def dropped(episode: Episode) -> list[tuple[str, str | None]]:
    credit = {
        "default": PolicyCredit(
            "even", lambda episodes: [[1.0] * len(e.transitions) for e in episodes], CreditKind.RETURN
        )
    }
    return [(each.call, each.dropped) for each in make_batches([[episode]], BatchPlan(credit)).dropped]


async def test_a_call_given_up_by_wait_for(stack: Stack, attempt: RunningAttempt) -> None:
    hold = Hold(Say("too late"))
    stack.upstream.script(hold, Say("in time"))
    with attempt.running():
        client = stack.client()
        asked = asyncio.create_task(ask(client))
        await until(hold.arrived.is_set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.01)
        hold.release.set()
        assert (await ask(client)).choices[0].message.content == "in time"
    await recorded(attempt, True, False)
    lost, got = await attempt.calls()
    assert lost.choices[0].response_ids is not None
    episode = await attempt.close()
    assert [each.key.call for each in episode.transitions] == [got.id]
    assert [each.response["content"] for each in episode.undelivered] == ["too late"]
    assert (lost.id, DropReason.UNDELIVERED) in dropped(episode)


async def test_a_timeout_with_a_retry_is_delivered(stack: Stack, attempt: RunningAttempt) -> None:
    hold = Hold()
    stack.upstream.script(hold)
    with attempt.running():
        asking = asyncio.create_task(ask(stack.client(timeout=0.3, max_retries=9)))
        await hold.arrived.wait()
        await until(lambda: clients_waiting(stack, attempt.key) > 1)
        hold.release.set()
        reply = await asking
    await recorded(attempt, False)
    assert [each.key.call for each in (await attempt.close()).transitions] == [reply.id]


async def test_a_retry_after_the_call_was_recorded_as_undelivered(stack: Stack, attempt: RunningAttempt) -> None:
    hold = Hold()
    stack.upstream.script(hold)
    with attempt.running():
        body: Any = {"model": "default", "messages": QUESTION}
        async with httpx2.AsyncClient(trust_env=False) as client:
            url, marked = f"{stack.url()}/chat/completions", {"x-stainless-retry-count": "0"}
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(url, json=body, headers=marked, timeout=0.2)
            hold.release.set()
            await recorded(attempt, True)
            again = await client.post(url, json=body, headers={"x-stainless-retry-count": "1"})
    await recorded(attempt, False)
    assert [call.id for call in await attempt.calls()] == [again.json()["id"]]


async def test_a_client_that_is_closed_right_after_its_reply_got_it(stack: Stack, attempt: RunningAttempt) -> None:
    with attempt.running():
        for stream in (False, True) * 3:
            async with openai.AsyncOpenAI(base_url=stack.url(), api_key="k", max_retries=0) as client:
                reply = await ask(client, stream=stream)
                if stream:
                    assert [chunk async for chunk in reply]
    episode = await attempt.close()
    assert (len(episode.transitions), episode.undelivered) == (6, ())
    assert not any(call.undelivered for call in await attempt.calls())


async def test_a_reply_larger_than_the_sockets_buffers_that_is_not_read(stack: Stack) -> None:
    """A client that agl is not attached to: the connection shows it."""
    attempt = await stack.attempt()
    message = {"role": "assistant", "content": "x" * (24 << 20)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    stack.upstream.script(Raw(json.dumps({"choices": [choice]}).encode()))
    request = stack.client(attempt.key).chat.completions.with_streaming_response.create(
        model="default", messages=QUESTION
    )
    async with request as response:
        assert response.status_code == 200
    await recorded(attempt, True)
