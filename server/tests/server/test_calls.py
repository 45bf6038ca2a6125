"""One model call: which requests are one, what it may sample, who answers it, and whether its reply arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

import agl_core
from agl_core.capture.requests import HEADER_AGENT
from agl_core.testing.scripts import Drop, Fail, Hold, Raw, Say
from agl_core.types import AttemptKey, Ending, Mode, Sampling
from agl_core.wire import CloseRequest
from agl_server.testing import LeasedAttempt, Stack, running_stack, until

from .server_aids import GOOD, HELLO, post


async def test_the_clients_retry_of_a_failed_call_is_one_call(stack: Stack, key: AttemptKey) -> None:
    stack.upstream.script(Fail(500), Drop(), Say("at last"))
    reply = await stack.client(key, max_retries=2).chat.completions.create(**GOOD)
    assert reply.choices[0].message.content == "at last"
    (call,) = await stack.calls(key)
    assert call.sequence == 0
    assert len({received.body["seed"] for received in stack.upstream.received}) == 1
    assert len(stack.upstream.received) == 3
    await stack.client(key).chat.completions.create(**GOOD)
    assert [call.sequence for call in await stack.calls(key)] == [0, 1]


async def test_only_the_clients_marker_makes_an_equal_request_a_retry_which_gets_the_stored_reply(
    stack: Stack, key: AttemptKey
) -> None:
    body = json.dumps(GOOD).encode()
    replies = [await post(stack, key, body, **headers) for headers in ({}, {"x-stainless-retry-count": "0"})]
    assert replies[0].json()["id"] != replies[1].json()["id"]
    retried = [await post(stack, key, body, **{"x-stainless-retry-count": "1"}) for _ in range(2)]
    assert [reply.json() for reply in retried] == [reply.json() for reply in replies]
    assert len(await stack.calls(key)) == 2
    other = await post(stack, key, body + b" ", **{"x-stainless-retry-count": "1"})
    assert other.json()["id"] not in [reply.json()["id"] for reply in replies], "another body is another call"


@pytest.mark.parametrize(("limit", "value"), [("MAX_KEPT", 2), ("MAX_RETRIED", 2), ("MAX_KEPT_BYTES", 6500)])
async def test_replies_are_kept_for_the_latest_calls(
    stack: Stack, key: AttemptKey, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(f"agl_core.apis.answered.{limit}", value)
    stack.upstream.script(*(Say(1000 * "x") for _ in range(10)))

    async def ask(number: int, tries: int = 0) -> str:
        body, headers = {**GOOD, "user": str(number)}, {"x-stainless-retry-count": str(tries)}
        return str((await post(stack, key, body, **headers)).json()["id"])

    ids = [await ask(number) for number in range(6)]
    assert await ask(5, tries=1) == ids[5]
    assert await ask(0, tries=1) != ids[0], "asked so late it is a call of its own"


async def test_a_call_that_ends_after_its_attempt_is_late(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    hold = Hold()
    await client.chat.completions.create(**GOOD)
    stack.upstream.script(hold)
    asking = asyncio.ensure_future(client.chat.completions.create(**GOOD))
    await hold.arrived.wait()
    assert (await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.TIMED_OUT))).counted
    hold.release.set()
    with pytest.raises(openai.APIStatusError, match="is closed") as raised:
        await asking
    assert raised.value.status_code == 410
    assert [call.late for call in await stack.calls(key)] == [False, True]
    with pytest.raises(openai.APIStatusError, match="is closed"):
        await client.chat.completions.create(**GOOD)
    assert len(stack.upstream.received) == 2


async def test_closing_waits_for_the_call_that_is_being_written(stack: Stack, key: AttemptKey) -> None:
    """It completed, so the attempt counts and is not tried again."""
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


@pytest.fixture
async def attempt(stack: Stack) -> AsyncIterator[LeasedAttempt]:
    attachment = agl_core.attach([])
    yield await stack.attempt()
    attachment.detach()


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**GOOD, **fields)


async def recorded(attempt: LeasedAttempt, *undelivered: bool) -> None:
    """Wait until the calls are recorded like this, in the order of their starts."""
    async with asyncio.timeout(20):
        while [call.undelivered for call in await attempt.calls()] != list(undelivered):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_call_given_up_by_wait_for(stack: Stack, attempt: LeasedAttempt) -> None:
    hold = Hold(Say("too late"))
    stack.upstream.script(hold, Say("in time"))
    with attempt.running():
        client = stack.client()
        asking = asyncio.create_task(ask(client))
        await until(hold.arrived.is_set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.01)
        hold.release.set()
        assert (await ask(client)).choices[0].message.content == "in time"
    await recorded(attempt, True, False)
    lost, got = await attempt.calls()
    assert lost.choices[0].response_ids is not None
    episode = await attempt.close()
    assert [transition.key.call for transition in episode.transitions] == [got.id]
    assert [transition.response["content"] for transition in episode.undelivered] == ["too late"]


async def test_a_retry_after_the_call_was_recorded_as_undelivered(stack: Stack, attempt: LeasedAttempt) -> None:
    hold = Hold()
    stack.upstream.script(hold)
    with attempt.running():
        async with httpx2.AsyncClient(trust_env=False) as client:
            url, marked = f"{stack.url()}/chat/completions", {"x-stainless-retry-count": "0"}
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(url, json=GOOD, headers=marked, timeout=0.2)
            hold.release.set()
            await recorded(attempt, True)
            again = await client.post(url, json=GOOD, headers={"x-stainless-retry-count": "1"})
    await recorded(attempt, False)
    assert [call.id for call in await attempt.calls()] == [again.json()["id"]]


async def test_a_client_that_is_closed_right_after_its_reply_got_it(stack: Stack, attempt: LeasedAttempt) -> None:
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
    request = stack.client(attempt.key).chat.completions.with_streaming_response.create(**GOOD)
    async with request as response:
        assert response.status_code == 200
    await recorded(attempt, True)


DISTORTING = {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 3}, "top_k": 3, "min_p": 0.1}
DISTORTING["repetition_penalty"] = 1.2
"""Settings by which log-probabilities are no longer those of what is trained."""


@pytest.mark.parametrize(
    ("mode", "temperature"), [(Mode.TRAIN, 0.7), (Mode.EVAL_SAMPLED, 0.7), (Mode.EVAL_GREEDY, 0.0)]
)
async def test_the_mode_fixes_the_sampling(stack: Stack, mode: Mode, temperature: float) -> None:
    key = await stack.lease(mode=mode)
    asked: Any = {"temperature": 1.9, "top_p": 0.1, "seed": 5, "max_completion_tokens": 7}
    await stack.client(key).chat.completions.create(**GOOD, **asked, extra_body=DISTORTING)
    await stack.client(key).chat.completions.create(**GOOD, max_tokens=99_999)
    narrow, wide = (received.body for received in stack.upstream.received)
    assert (narrow["temperature"], narrow["top_p"], narrow["max_tokens"]) == (temperature, 1.0, 7)
    assert wide["max_tokens"] == 512
    assert "max_completion_tokens" not in narrow
    assert DISTORTING.keys() & narrow.keys() == (set() if mode.trains else DISTORTING.keys())
    first, second = await stack.calls(key)
    assert DISTORTING.keys() <= first.request.keys()
    assert first.requested == Sampling(temperature=1.9, top_p=0.1, max_tokens=7, seed=5)
    assert first.effective == Sampling(temperature=temperature, top_p=1.0, max_tokens=7, seed=narrow["seed"])
    assert second.requested == Sampling(max_tokens=99_999)


async def test_seeds_differ_between_calls_and_repeat_exactly() -> None:
    async def seeds(run_seed: int) -> list[int]:
        async with running_stack(seed=run_seed) as stack:
            for fields in ({"member": 0}, {"member": 1}, {"step": 1}, {"position": 1}, {"mode": Mode.EVAL_SAMPLED}):
                key = await stack.lease(**fields)
                for _ in range(2):
                    await stack.client(key).chat.completions.create(model="default", messages=HELLO, seed=5)
            return [received.body["seed"] for received in stack.upstream.received]

    first = await seeds(1)
    assert len(set(first)) == 10
    assert all(0 <= seed < 2**63 for seed in first)
    assert await seeds(1) == first
    assert not set(await seeds(2)) & set(first)


TWO_POLICIES = {"writer": "w-v", "judge": "j-v"}


async def test_an_agent_gets_its_own_policy_whatever_model_it_asks_for() -> None:
    async with running_stack(
        upstream_fields=lambda _: {"models": TWO_POLICIES}, agents={"judge": ["critic"], "writer": ["edit*"]}
    ) as stack:
        for agent, model, policy in (
            ("critic", "gpt-4o", "judge"),
            ("critic", "writer", "judge"),
            ("editor-2", "gpt-4o", "writer"),
            ("edit\u00f6r", "gpt-4o", "writer"),
            ("somebody", "writer", "writer"),
            ("somebody", "judge", "judge"),
            (None, "judge", "judge"),
            ("Critic", "writer", "writer"),
        ):
            key = await stack.lease()
            headers = {} if agent is None else {HEADER_AGENT: quote(agent)}
            reply = await stack.client(key).chat.completions.create(model=model, messages=HELLO, extra_headers=headers)
            (call,) = await stack.calls(key)
            assert (reply.model, call.policy, call.agent) == (model, policy, agent)
            assert stack.upstream.received[-1].body["model"] == TWO_POLICIES[policy]
        assert [model.id async for model in stack.client(key).models.list()] == ["judge", "writer"]
        for headers, caller in (({HEADER_AGENT: "poet"}, "the agent 'poet'"), ({}, "a call without")):
            with pytest.raises(openai.NotFoundError) as error:
                await stack.client(key).chat.completions.create(model="writr", messages=HELLO, extra_headers=headers)
            for words in (f"none has {caller}", "`agents`", "Did you mean 'writer'"):
                assert words in error.value.message


async def test_agents_of_a_default_policy_do_not_shut_others_out() -> None:
    async with running_stack(
        upstream_fields=lambda _: {"models": {"default": "d-v", "judge": "j-v"}}, agents={"default": ["a"]}
    ) as stack:
        key = await stack.lease()
        await stack.client(key).chat.completions.create(
            model="gpt-4o", messages=HELLO, extra_headers={HEADER_AGENT: "b"}
        )
        assert (await stack.calls(key))[-1].policy == "default"
