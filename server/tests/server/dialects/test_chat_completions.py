"""Chat completions through the gateway: by the official client, by hand, and by LangChain's own integration suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from memory_store import MemoryStore
from obedient import obey
from openai import AsyncOpenAI
from running_servers import stack_in_thread

from agl_core.capture.requests import HEADER_POLICY
from agl_core.testing.scripts import Say
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import AttemptKey
from agl_server.testing import Stack

from ..server_aids import GOOD, HELLO, OWN, SMALLEST, assistant, call, chunks_of, closed, post, reply


def as_ids(text: str) -> list[int]:
    return [*text.encode(), END_TOKEN]


async def test_logprobs_go_to_clients_that_ask(stack: Stack, client: AsyncOpenAI) -> None:
    stack.upstream.script(*[Say("ab" * 100)] * 2)
    request: dict[str, Any] = {"model": "default", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    reply = await client.chat.completions.create(**request)
    content = reply.choices[0].logprobs.content or []
    assert [token.logprob for token in content] == [logprob(token) for token in as_ids("ab" * 100)]
    assert len(content[0].top_logprobs) == 2
    streamed = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == content


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_a_stream_is_in_pieces_and_has_the_usage_that_is_asked_for(
    stack: Stack, key: AttemptKey, route: str
) -> None:
    stack.upstream.script(*[Say("a long text, " * 20)] * 2)
    requests = [{**SMALLEST[route], "stream": True, "stream_options": o} for o in ({}, {"include_usage": True})]
    silent, at_the_end = [chunks_of((await post(stack, key, request, route)).text) for request in requests]
    assert len(silent) > 4
    assert not any("usage" in chunk for chunk in silent)
    *chunks, last = [chunk["usage"] for chunk in at_the_end]
    assert (at_the_end[-1]["choices"], last["completion_tokens"]) == ([], 261)
    assert chunks == [None] * len(silent)


async def test_completions_have_logprobs_in_the_older_shape(stack: Stack, key: AttemptKey) -> None:
    request = {**SMALLEST["completions"], "logprobs": 2}
    stack.upstream.script(*[Say("ab" * 100)] * 2)
    whole = await post(stack, key, {**request, "n": 2}, "completions")
    streamed = await post(stack, key, {**request, "stream": True}, "completions")
    first, second = whole.json()["choices"]
    assert (first["text"], second["text"]) == ("ab" * 100, "ab" * 100 + " (1)")
    assert first["logprobs"]["token_logprobs"] == [logprob(token) for token in as_ids("ab" * 100)]
    assert first["logprobs"]["text_offset"] == list(range(201))
    assert all(first["logprobs"]["top_logprobs"])
    carried = [choice["logprobs"] for chunk in chunks_of(streamed.text) for choice in chunk["choices"]]
    for name, values in first["logprobs"].items():
        assert [value for part in carried if part for value in part[name]] == values


async def test_the_version_is_the_engines_the_headers_or_the_trainers(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI
) -> None:

    async def ask() -> int | None:
        await client.chat.completions.create(**GOOD)
        return (await stack.calls(key))[-1].version

    assert await ask() is None
    stack.server.versions["default"] = 7
    assert await ask() == 7
    stack.upstream.headers[HEADER_POLICY] = "8"
    assert await ask() == 8
    stack.upstream.more = {"agl": {"version": 9}}
    assert await ask() == 9


async def test_log_probabilities_that_do_not_fit_the_ids_are_not_recorded(stack: Stack, key: AttemptKey) -> None:
    stack.upstream.script(reply(OWN["text"], logprobs={"content": [{"token": "a", "logprob": -1.0}]}))
    await stack.client(key).chat.completions.create(**GOOD)
    (call,) = await stack.calls(key)
    assert call.choices[0].response_ids is not None
    assert call.choices[0].logprobs is None


async def test_the_reply_waits_for_the_commit(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    store: MemoryStore = stack.store

    async def ask(stream: bool) -> None:
        """Up to the end of the reply, or of what a stream has of it."""
        reply: Any = await client.chat.completions.create(**GOOD, stream=stream)
        while stream and (await anext(reply)).choices[0].finish_reason is None:
            pass

    for stream in (False, True):
        store.writable.clear()
        store.write_waits.clear()
        calls = len(await stack.calls(key))
        asking = asyncio.ensure_future(ask(stream))
        await store.write_waits.wait()
        done, _ = await asyncio.wait({asking}, timeout=0.05)
        assert not done, "the reply came before its call was committed"
        assert len(await stack.calls(key)) == calls
        store.writable.set()
        await asking
        assert len(await stack.calls(key)) == calls + 1


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_each_choice_has_its_text_and_the_ids_and_prompt_logprobs_that_are_asked_for(
    stack: Stack, route: str
) -> None:
    key, chat = await stack.lease(), route == "chat/completions"
    stack.upstream.more = {"prompt_logprobs": [None, {"7": {"logprob": -0.5}}]}
    request = {**SMALLEST[route], "n": 2, "return_token_ids": True}
    whole = await post(stack, key, {**request, "prompt_logprobs": 1}, route)
    streamed = await post(stack, key, {**request, "stream": True}, route)
    stream_of_prompt = await post(stack, key, {**request, "prompt_logprobs": 1, "stream": True}, route)
    first, second = await stack.calls(key)
    body = whole.json()
    for choice, recorded in zip(body["choices"], first.choices, strict=True):
        of_prompt = body if chat else choice
        assert choice["token_ids"] == recorded.response_ids.tolist()
        assert (choice["message"]["content"] if chat else choice["text"]) == recorded.message["content"]
        assert of_prompt["prompt_token_ids"] == first.prompt_ids.tolist()
        assert of_prompt["prompt_logprobs"] == stack.upstream.more["prompt_logprobs"]
    assert stack.upstream.received[0].body["prompt_logprobs"] == 1
    assert len({choice.message["content"] for choice in (*first.choices, *second.choices)}) == 2
    chunks = chunks_of(streamed.text)
    for index, recorded in enumerate(second.choices):
        of_choice = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for part in of_choice for token in part.get("token_ids", ())] == recorded.response_ids.tolist()
        texts = [part["delta"].get("content") if chat else part["text"] for part in of_choice]
        assert "".join(filter(None, texts)) == recorded.message["content"]
    assert (chunks[0] if chat else chunks[0]["choices"][0])["prompt_token_ids"] == first.prompt_ids.tolist()
    assert (stream_of_prompt.status_code, stream_of_prompt.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_calls_of_one_reply_can_be_told_apart(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    """Some endpoints give several calls of a reply the same id; agents join results to calls by it."""
    calls = [call("call_0", "add", '{"a": 1}'), call("call_0", "add", '{"a": 2}')]
    stack.upstream.script(reply(assistant(None, *calls)))
    message = (await client.chat.completions.create(**GOOD)).choices[0].message
    first, second = (tool_call.id for tool_call in message.tool_calls or ())
    assert first != second
    results: Any = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in ((second, "2"), (first, "1"))]
    echo: Any = message.model_dump(exclude_none=True)
    await client.chat.completions.create(model="default", messages=[*HELLO, echo, *results])
    (transition, _) = (await closed(stack, key)).transitions
    assert [(result.arguments, result.result) for result in transition.tool_results] == [
        ({"a": 1}, "1"),
        ({"a": 2}, "2"),
    ]


async def test_half_a_surrogate_pair_is_no_reason_to_refuse_an_episode(stack: Stack, key: AttemptKey) -> None:
    """A tool that cuts a text in the middle of an emoji writes one, and every later request repeats it."""
    for route, body in SMALLEST.items():
        content = json.dumps(body).replace("hello", "a\\ud83c").encode()
        assert (await post(stack, key, content, route)).status_code == 200, route
    assert [recorded.request["messages"][0]["content"] for recorded in await stack.calls(key)] == ["a\ufffd"] * 4
    await post(stack, key, {**GOOD, "messages": [{"role": "user", "content": "🌍 \\ud83c a\ud83c"}]})
    assert (await stack.calls(key))[-1].request["messages"][0]["content"] == "🌍 \\ud83c a\ufffd"


# LangChain's own integration suite for chat models. By its properties it leaves out images, PDFs and audio (text
# models), Anthropic's content blocks, and recorded cassettes (`test_stream_time` needs them).


class TestChatOpenAIThroughGateway(ChatModelIntegrationTests):
    base_url: str
    api_key: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _serve(cls) -> Iterator[None]:
        with stack_in_thread() as (stack, portal):
            stack.upstream.answer = obey
            key = portal.call(stack.lease)
            cls.base_url, cls.api_key = stack.url(key), stack.key(key)
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "default",
            "base_url": self.base_url,
            "api_key": self.api_key,
            "stream_usage": True,
            "max_retries": 0,
            # LangChain shares one async client between models; here each test has an event loop of its own.
            "http_async_client": openai.DefaultAsyncHttpxClient(),
        }

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_json_mode(self) -> bool:
        return True
