"""Calls that no server records: what the HTTP library saw of them is what a gateway would have recorded."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import httpx
import httpx2
import numpy as np
import pytest

import agl_core
from agl_core.apis.alone import LocalRollouts
from agl_core.apis.reply import called, reasoning_of
from agl_core.capture import identify, running
from agl_core.learning.rewards import reported
from agl_core.testing.scripts import Fail, Say
from agl_core.types import Ending, Episode, FinishReason
from agl_core.types.forms import parse_if_json
from agl_server.testing import Stack

from ..server_aids import HELLO, OWN, SMALLEST, reply

FILE = {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}
SEARCHED = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}}


@pytest.fixture(autouse=True)
def attached() -> Iterator[None]:
    attachment = agl_core.attach([])
    yield
    attachment.detach()


class Endpoint:
    """An attempt's URL on a server, for an agent that is run without a server."""

    def __init__(self, stack: Stack, key: Any) -> None:
        self.stack, self.key = stack, key
        self.alone = LocalRollouts()

    async def ask(self, route: str, *bodies: Mapping[str, Any], leave: bool = False) -> Episode:
        """The episode of an agent that sends these requests; it may `leave` each stream after its first part."""
        rollout = self.alone.begin("alone", "hello")
        headers = {"Authorization": f"Bearer {self.stack.key(self.key)}"}
        with running(rollout.attempt), identify("solver", parent_span="s1"):
            async with httpx2.AsyncClient(trust_env=False, headers=headers) as client:
                for body in bodies:
                    request = client.build_request("POST", f"{self.stack.url(self.key)}/{route}", json=dict(body))
                    response = await client.send(request, stream=bool(body.get("stream")))
                    if leave:
                        await anext(response.aiter_bytes())
                        await response.aclose()
                    else:
                        await response.aread()
        rollout.finish("done")
        (episode,) = self.alone.episodes()
        return episode


@pytest.fixture
async def endpoint(stack: Stack) -> Endpoint:
    return Endpoint(stack, await stack.lease())


def meaning(message: Mapping[str, Any]) -> Any:
    """What a reply says, however its API writes it."""
    calls = message.get("tool_calls") or ()
    tools = [(call["id"], name, parse_if_json(text)) for call in calls for name, text in [called(call)]]
    return message.get("content") or "", reasoning_of(message), tools


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("route", "message"),
    [
        ("completions", "text"),
        *itertools.product(
            ("chat/completions", "responses", "messages"),
            ("text", "one call", "text and parallel calls", "reasoning"),
        ),
    ],
)
async def test_it_is_what_a_gateway_records(endpoint: Endpoint, route: str, message: str, streamed: bool) -> None:
    endpoint.stack.upstream.script(reply(OWN[message]))
    ids = {"return_token_ids": True, "logprobs": True if route == "chat/completions" else 0}
    returns_ids = route.endswith("completions")
    request = {**SMALLEST[route], "temperature": 0.5, "stream": streamed, **(ids if returns_ids else {})}
    episode = await endpoint.ask(route, request)
    (recorded,), (mine,) = (await endpoint.stack.episode(endpoint.key)).transitions, episode.transitions
    assert (mine.agent, mine.parent_span, episode.ending, episode.bypassed) == ("solver", "s1", Ending.FINISHED, None)
    assert (mine.messages, mine.tools, mine.finish_reason) == (
        recorded.messages,
        recorded.tools,
        recorded.finish_reason,
    )
    assert meaning(mine.response) == meaning(recorded.response)
    assert (mine.policy, mine.temperature) == ("default", 0.5)
    for name in ("prompt_ids", "response_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(recorded, name) if returns_ids else None, name)


async def test_each_request_is_a_call_and_one_without_a_reply_is_none(endpoint: Endpoint) -> None:
    stream = {**SMALLEST["chat/completions"], "stream": True}
    endpoint.stack.upstream.script(Say("a"), Fail(400), Say("b"))
    episode = await endpoint.ask("chat/completions", stream, SMALLEST["chat/completions"], stream)
    assert [(t.turn, t.response["content"]) for t in episode.transitions] == [(0, "a"), (1, "b")]


async def test_a_stream_that_is_left_is_a_call_that_was_cut(endpoint: Endpoint) -> None:
    request = {**SMALLEST["chat/completions"], "stream": True}
    (transition,) = (await endpoint.ask("chat/completions", request, leave=True)).transitions
    assert transition.finish_reason is FinishReason.ABORTED


def reply_to(
    alone: LocalRollouts, url: str, request: Mapping[str, Any], response: Any, *, stream: bool = False
) -> Episode:
    """The latest episode of an agent that sends one request, to which this is the reply."""
    wire, rollout = httpx.MockTransport(lambda _: response), alone.begin("r")
    with httpx.Client(transport=wire) as client, running(rollout.attempt):
        client.send(client.build_request("POST", url, json=dict(request)), stream=stream).read()
    rollout.finish()
    return alone.episodes()[-1]


def test_what_agl_would_not_pass_on_is_kept_as_its_api_has_it() -> None:
    said = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    reply = httpx.Response(200, json={"id": "r", "object": "response", "output": [SEARCHED, said]})
    request = {"model": "m", "instructions": "Search.", "input": [*HELLO, FILE]}
    (transition,) = reply_to(LocalRollouts(), "https://api.openai.com/v1/responses", request, reply).transitions
    assert transition.messages == ({"role": "system", "content": "Search."}, *HELLO, FILE)
    assert transition.response["content"] == "4"


def test_a_stream_may_be_compressed() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "4"}, "finish_reason": "stop"}]}
    body = gzip.compress(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    headers = {"content-type": "text/event-stream; charset=utf-8", "content-encoding": "gzip"}
    reply = httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))
    request = {"model": "m", "messages": HELLO, "stream": True}
    (transition,) = reply_to(
        LocalRollouts(), "https://a.example/chat/completions", request, reply, stream=True
    ).transitions
    assert transition.response["content"] == "4"


def test_a_call_to_an_unknown_api_is_counted_and_nothing_else_is() -> None:
    alone, gemini = LocalRollouts(), "https://generativelanguage.googleapis.com/v1beta/models/gemini-9:generateContent"
    for url, counted in ((gemini, {gemini: 1}), ("https://a.example/search", None)):
        episode = reply_to(alone, url, {}, httpx.Response(200, json={}))
        assert (episode.transitions, episode.bypassed) == ((), counted)


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Sends what httpx is given through aiohttp, as LiteLLM does."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, str(request.url), headers=request.headers, data=body) as response,
        ):
            return httpx.Response(response.status, content=await response.read())


async def test_a_call_that_is_recorded_is_not_counted_though_another_library_carries_it(endpoint: Endpoint) -> None:
    rollout = endpoint.alone.begin("r")
    headers = {"Authorization": f"Bearer {endpoint.stack.key(endpoint.key)}"}
    url = f"{endpoint.stack.url(endpoint.key)}/chat/completions"
    async with httpx.AsyncClient(transport=AiohttpTransport(), headers=headers) as client:
        with running(rollout.attempt):
            await client.post(url, json=SMALLEST["chat/completions"])
    rollout.finish()
    (episode,) = endpoint.alone.episodes()
    assert (len(episode.transitions), episode.bypassed) == (1, None)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses", "messages"])
async def test_a_reward_of_a_call_is_found_by_the_id_of_its_reply(
    endpoint: Endpoint, route: str, streamed: bool
) -> None:
    request, rollout = {**SMALLEST[route], "stream": streamed}, endpoint.alone.begin("r")
    headers = {"Authorization": f"Bearer {endpoint.stack.key(endpoint.key)}"}
    with running(rollout.attempt):
        async with httpx2.AsyncClient(trust_env=False, headers=headers) as client:
            for _ in range(2):
                await client.post(f"{endpoint.stack.url(endpoint.key)}/{route}", json=request)
        agl_core.reward(0.5)
        agl_core.reward(0.25, call=(await endpoint.stack.calls(endpoint.key))[1].id)
        agl_core.reward(9, call="made-up")
    rollout.finish()
    (episode,) = endpoint.alone.episodes()
    assert [(r.call, r.value) for r in reported(episode)] == [(None, 0.5), (episode.transitions[1].key.call, 0.25)]


def test_the_latest_episodes_are_kept_with_the_rewards_that_the_agent_reports() -> None:
    alone = LocalRollouts(keep=2)
    for name in "abc":
        rollout = alone.begin(name)
        with running(rollout.attempt):
            agl_core.reward(0.5)
            agl_core.reward(1, name="short")
        rollout.finish(name)
    episodes = alone.episodes()
    sums = [(episode.result, [r.value for r in reported(episode)]) for episode in episodes]
    assert sums == [("b", [1.5]), ("c", [1.5])]
    assert [(r.rollout, r.name, r.value) for r in episodes[0].rewards] == [("b", "reward", 0.5), ("b", "short", 1.0)]
    alone.clear()
    assert alone.episodes() == []
