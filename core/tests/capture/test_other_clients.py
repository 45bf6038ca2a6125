"""Agents whose HTTP client is not httpx: their calls are stamped, so that tools without ids find their calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
import requests
import urllib3

import agl_core
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.testing.server import LeasedAttempt, Stack, running_stack

pytestmark = pytest.mark.usefixtures("attached")

BODY = json.dumps({"model": "default", "messages": [{"role": "user", "content": "hello"}]}).encode()
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer a-key-of-no-attempt"}


def by_requests(url: str) -> Any:
    return requests.post(url, data=BODY, headers=HEADERS, timeout=20).json()


def by_urllib3(url: str) -> Any:
    with urllib3.PoolManager(headers=HEADERS) as pool:
        return pool.request("POST", url, body=BODY).json()


async def by_aiohttp(url: str) -> Any:
    async with aiohttp.ClientSession(headers=HEADERS) as session, session.post(url, data=BODY) as reply:
        return await reply.json()


async def by_aiohttp_with_a_base(url: str) -> Any:
    parts = urlsplit(url)
    async with aiohttp.ClientSession(f"{parts.scheme}://{parts.netloc}") as session:
        reply = await session.post(parts.path, json=json.loads(BODY), headers=[*HEADERS.items()])
        return await reply.json()


SYNC: list[Callable[[str], Any]] = [by_requests, by_urllib3]
ASYNC: list[Callable[[str], Awaitable[Any]]] = [by_aiohttp, by_aiohttp_with_a_base]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as running:
        yield running


@agl_core.tool
def look_up(what: str) -> str:
    return what


def joined(episode: Any) -> list[list[str]]:
    return [[result.arguments["what"] for result in transition.tool_results] for transition in episode.transitions]


@pytest.mark.parametrize("ask", [*SYNC, *ASYNC], ids=lambda ask: ask.__name__)
async def test_calls_of_other_clients_are_stamped_and_tools_join_them_but_no_other_host_is_told(
    stack: Stack, ask: Any
) -> None:
    attempt = await stack.attempt()
    url, elsewhere = f"{stack.url()}/chat/completions", f"{stack.upstream.url}/chat/completions"

    def agent() -> None:
        with openai.OpenAI(base_url=stack.url(), api_key="k") as client, agl_core.agent("solver"):
            client.chat.completions.create(model="default", messages=json.loads(BODY)["messages"])
            look_up("first")
            assert ask(url)["choices"][0]["message"]["role"] == "assistant"
            look_up("second")
            ask(elsewhere)
            ask(url)
            look_up("third")

    async def async_agent() -> None:
        with agl_core.agent("solver"):
            await openai_call(stack)
            look_up("first")
            assert (await ask(url))["choices"][0]["message"]["role"] == "assistant"
            look_up("second")
            await ask(elsewhere)
            await ask(url)
            look_up("third")

    with attempt.running():
        await (async_agent() if asyncio.iscoroutinefunction(ask) else asyncio.to_thread(agent))
    calls = await attempt.calls()
    assert [(call.agent, call.stamped) for call in calls] == [("solver", True)] * 3
    directly = stack.upstream.received[2].headers
    assert not [name for name in directly if name.lower().startswith("x-agl")]
    assert stack.key(attempt.key) not in str(dict(directly))
    assert attempt.active.recording.bypassed_calls == {elsewhere: 1}, "but the rollout says that it was called"
    episode = await attempt.close()
    assert joined(episode) == [["first"], ["second"], ["third"]]
    assert (episode.unjoined, episode.unattributed) == ((), 0)


async def test_after_a_call_of_an_unknown_client_no_tool_is_joined(stack: Stack) -> None:
    attempt = await stack.attempt()
    with attempt.running(), agl_core.agent("solver"):
        await openai_call(stack)
        look_up("first")
        await openai_call(stack)
        await by_a_raw_socket(stack, attempt)
        look_up("whose?")
        await openai_call(stack)
        look_up("last")
    assert [call.stamped for call in await attempt.calls()] == [True, True, False, True]
    episode = await attempt.close()
    assert joined(episode) == [["first"], [], [], ["last"]]
    assert [result.arguments["what"] for result in episode.unjoined] == ["whose?"]
    assert episode.unattributed == 1


async def openai_call(stack: Stack) -> openai.types.chat.ChatCompletion:
    messages = json.loads(BODY)["messages"]
    return await stack.client().chat.completions.create(model="default", messages=messages)


async def by_a_raw_socket(stack: Stack, attempt: LeasedAttempt) -> None:
    parts = urlsplit(stack.server.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key(attempt.key)}\r\n"
        f"Connection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    writer.write(head.encode() + BODY)
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply
    assert HEADER_ROLLOUT.encode() not in reply
