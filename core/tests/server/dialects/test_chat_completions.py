"""Chat completions through the gateway, by the official client and by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.scripts import Raw, Say
from agl_core.testing.server import Stack, running_stack
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import Ending, FinishReason, Mode
from agl_core.wire.headers import HEADER_AGENT, HEADER_PARENT_SPAN, HEADER_POLICY, HEADER_ROLLOUT
from agl_core.wire.workers import CloseRequest

from ..api_oracles import call, post_each, reply
from ..posting import post

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def as_ids(text: str) -> list[int]:
    return [*text.encode(), END_TOKEN]


async def test_a_call_is_recorded_exactly_as_sampled(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Say("four"))
    reply = await stack.client(key).chat.completions.create(model="default", messages=HELLO, metadata={"a": "b"})
    assert reply.choices[0].message.content == "four"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    (call,) = await stack.calls(key)
    (choice,) = call.choices
    assert (call.id, call.sequence, call.policy, call.api) == (reply.id, 0, "default", "chat.completions")
    assert call.request == {"model": "default", "messages": HELLO, "metadata": {"a": "b"}}
    assert call.prompt_ids is not None
    assert call.prompt_ids.tolist() == list(json.dumps(HELLO).encode())
    assert choice.response_ids is not None
    assert choice.response_ids.tolist() == as_ids("four")
    assert choice.logprobs is not None
    assert choice.logprobs.tolist() == np.float32([logprob(each) for each in as_ids("four")]).tolist()
    assert (choice.finish_reason, choice.message["content"]) == (FinishReason.STOP, "four")
    assert call.started <= call.ended
    assert (stack.server.counters.calls, stack.server.counters.without_ids) == (1, 0)


async def test_nothing_of_agl_reaches_the_agent(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.agl = {"version": 3, "prefilled": 1, "reused": 2, "prefix_broken": False, "choices": []}
    reply = await stack.client(key).chat.completions.with_raw_response.create(model="default", messages=HELLO)
    body = json.loads(reply.text if isinstance(reply.text, str) else reply.text())
    assert set(body) == {"id", "object", "created", "model", "usage", "choices"}
    assert set(body["choices"][0]) == {"index", "message", "finish_reason", "logprobs"}
    assert body["choices"][0]["logprobs"] is None
    assert body["model"] == "default"


async def test_logprobs_go_to_clients_that_ask(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(*[Say("ab" * 100)] * 2)
    asked: dict[str, Any] = {"model": "default", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    reply = await stack.client(key).chat.completions.create(**asked)
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content or []
    assert [each.logprob for each in content] == [logprob(each) for each in as_ids("ab" * 100)]
    assert len(content[0].top_logprobs) == 2
    streamed = []
    async for chunk in await stack.client(key).chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == content


async def test_streams_are_made_of_the_whole_reply(stack: Stack) -> None:
    key = await stack.lease()
    text = "a long text, " * 20
    stack.upstream.script(Say(text))
    stream = await stack.client(key).chat.completions.create(
        model="default", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert len(chunks) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(text) + 1
    assert all(chunk.usage is None for chunk in chunks)
    (call,) = await stack.calls(key)
    assert {chunk.id for chunk in [*chunks, last]} == {call.id}
    assert "stream" not in stack.upstream.received[0].body


async def test_several_choices_are_all_recorded(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(*[Say("x")] * 2)
    reply = await stack.client(key).chat.completions.create(model="default", messages=HELLO, n=3)
    assert [choice.message.content for choice in reply.choices] == ["x", "x (1)", "x (2)"]
    (call,) = await stack.calls(key)
    assert [c.response_ids.tolist() for c in call.choices if c.response_ids is not None] == [
        as_ids(text) for text in ("x", "x (1)", "x (2)")
    ]
    texts = ["", "", ""]
    async for chunk in await stack.client(key).chat.completions.create(
        model="default", messages=HELLO, n=3, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["x", "x (1)", "x (2)"]


async def test_what_the_client_asks_is_passed_on(stack: Stack) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    passed: dict[str, Any] = {
        "tools": [ADD],
        "tool_choice": "none",
        "stop": ["END"],
        "response_format": {"type": "json_object"},
        "user": "me",
        "presence_penalty": 0.5,
        "invented": {"x": 1},
    }
    known = {name: value for name, value in passed.items() if name != "invented"}
    await stack.client(key).chat.completions.create(
        model="default", messages=HELLO, extra_body={"invented": {"x": 1}}, **known
    )
    (received,) = stack.upstream.received
    assert {name: received.body[name] for name in passed} == passed
    assert received.body["model"] == "served"
    assert received.body["return_token_ids"] is received.body["logprobs"] is True
    assert received.headers["Authorization"] == "Bearer upstream-key"
    assert received.headers[HEADER_ROLLOUT] == f"{key.rollout}/{key.attempt}"


async def test_identity_is_recorded(stack: Stack) -> None:
    key = await stack.lease()
    headers = {
        HEADER_AGENT: "sch%C3%B6n writer",
        HEADER_PARENT_SPAN: "span-1",
        HEADER_ROLLOUT: f"{key.rollout}/{key.attempt}",
    }
    client = stack.client(api_key=stack.key(key), default_headers=headers)
    await client.chat.completions.create(model="default", messages=HELLO)
    (call,) = await stack.calls(key)
    assert (call.agent, call.parent_span) == ("schön writer", "span-1")


async def test_the_version_is_the_engines_the_headers_or_the_trainers(stack: Stack) -> None:
    key = await stack.lease()
    client = stack.client(key)

    async def ask() -> int | None:
        await client.chat.completions.create(model="default", messages=HELLO)
        return (await stack.calls(key))[-1].version

    assert await ask() is None
    stack.server.versions["default"] = 7
    assert await ask() == 7
    stack.upstream.headers[HEADER_POLICY] = "8"
    assert await ask() == 8
    stack.upstream.agl = {"version": 9}
    assert await ask() == 9


async def test_what_the_engine_tells_is_recorded(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Say("ab"))
    stack.upstream.agl = {
        "version": 1,
        "prefilled": 10,
        "reused": 20,
        "prefix_broken": True,
        "choices": [{"mask": [True, False, True], "parse_error": "no closing brace"}],
    }
    await stack.client(key).chat.completions.create(model="default", messages=HELLO)
    (call,) = await stack.calls(key)
    assert (call.prefilled, call.reused, call.prefix_broken) == (10, 20, True)
    assert call.choices[0].mask is not None
    assert call.choices[0].mask.tolist() == [True, False, True]
    assert call.choices[0].parse_error == "no closing brace"


async def test_replies_without_ids_are_recorded_and_counted(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.returns_ids = False
    await stack.client(key).chat.completions.create(model="default", messages=HELLO)
    (call,) = await stack.calls(key)
    assert call.prompt_ids is call.choices[0].response_ids is call.choices[0].logprobs is None
    assert stack.server.counters.without_ids == 1


async def test_an_upstream_that_returns_no_ids_is_not_asked_for_them() -> None:
    async with running_stack(upstream_fields=lambda _: {"returns_ids": False}) as stack:
        key = await stack.lease()
        await stack.client(key).chat.completions.create(model="default", messages=HELLO)
        assert not {"return_token_ids", "logprobs"} & set(stack.upstream.received[0].body)


async def test_log_probabilities_that_do_not_fit_the_ids_are_not_recorded(stack: Stack) -> None:
    key = await stack.lease()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
    }
    stack.upstream.script(Raw(json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()))
    await stack.client(key).chat.completions.create(model="default", messages=HELLO)
    (call,) = await stack.calls(key)
    assert call.choices[0].response_ids is not None
    assert call.choices[0].logprobs is None


async def test_the_reply_waits_for_the_commit(stack: Stack) -> None:
    key = await stack.lease()
    store: MemoryStore = stack.store
    for options in ({}, {"stream": True}):
        store.writable.clear()
        store.write_waits.clear()
        calls = len(await stack.calls(key))
        asking = asyncio.ensure_future(
            stack.client(key).chat.completions.create(model="default", messages=HELLO, **options)
        )
        await store.write_waits.wait()
        done, _ = await asyncio.wait({asking}, timeout=0.05)
        assert not done, "the reply came before its call was committed"
        assert len(await stack.calls(key)) == calls
        store.writable.set()
        await asking
        assert len(await stack.calls(key)) == calls + 1


async def test_concurrent_rollouts_are_told_apart(stack: Stack) -> None:
    keys = [await stack.lease(member=member) for member in range(8)]

    async def ask(key: Any, turn: int) -> None:
        headers = {HEADER_ROLLOUT: f"{key.rollout}/{key.attempt}", "Authorization": f"Bearer {stack.key(key)}"}
        message = {"role": "user", "content": f"{key.rollout} {turn}"}
        await shared.chat.completions.create(model="default", messages=[message], extra_headers=headers)  # type: ignore[list-item]

    shared = stack.client()
    await asyncio.gather(*(ask(key, turn) for key in keys for turn in range(4)))
    for key in keys:
        calls = await stack.calls(key)
        assert sorted(call.request["messages"][0]["content"] for call in calls) == [
            f"{key.rollout} {turn}" for turn in range(4)
        ]
        assert [call.sequence for call in calls] == [0, 1, 2, 3]


@pytest.mark.parametrize("api", ["chat.completions", "completions"])
async def test_token_ids_and_the_prompts_logprobs_are_returned_where_they_are_asked_for(stack: Stack, api: str) -> None:
    key = await stack.lease()
    chat = api == "chat.completions"
    asked: dict[str, Any] = {"model": "default", "n": 2, **({"messages": HELLO} if chat else {"prompt": "hello"})}
    stack.upstream.more = {"prompt_logprobs": [None, {"7": {"logprob": -0.5}}]}
    url = f"{stack.url(key)}/{api.replace('.', '/')}"
    more = {"return_token_ids": True, "prompt_logprobs": 1}
    whole, streamed, stream_of_prompt = await post_each(
        stack,
        url,
        [{**asked, **more}, {**asked, "return_token_ids": True, "stream": True}, {**asked, **more, "stream": True}],
    )
    first, second = await stack.calls(key)
    assert first.prompt_ids is not None
    body = whole.json()
    for choice, recorded in zip(body["choices"], first.choices, strict=True):
        assert recorded.response_ids is not None
        of_prompt = body if chat else choice
        assert choice["token_ids"] == recorded.response_ids.tolist()
        assert of_prompt["prompt_token_ids"] == first.prompt_ids.tolist()
        assert of_prompt["prompt_logprobs"] == stack.upstream.more["prompt_logprobs"]
    assert stack.upstream.received[0].body["prompt_logprobs"] == 1
    chunks = [json.loads(each.removeprefix("data: ")) for each in streamed.text.strip().split("\n\n")[:-1]]
    for place, recorded in enumerate(second.choices):
        of_choice = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == place]
        assert recorded.response_ids is not None
        assert [each["token_ids"] for each in of_choice if "token_ids" in each] == [recorded.response_ids.tolist()]
    assert (chunks[0] if chat else chunks[0]["choices"][0])["prompt_token_ids"] == first.prompt_ids.tolist()
    assert (stream_of_prompt.status_code, stream_of_prompt.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_usage_stands_in_each_chunk_where_it_is_asked_for(stack: Stack) -> None:
    client = stack.client(await stack.lease())
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": "default", "stream": True, "stream_options": options}
    for stream in (
        await client.chat.completions.create(**asked, messages=HELLO),
        await client.completions.create(**asked, prompt="hello"),
    ):
        *chunks, last = [chunk.usage async for chunk in stream]
        assert last is not None
        assert chunks == [last] * len(chunks)


async def test_calls_of_one_reply_can_be_told_apart(stack: Stack) -> None:
    """Some endpoints give several calls of a reply the same id; agents join results to calls by it."""
    key = await stack.lease()
    client = stack.client(key)
    calls = [call("call_0", "add", '{"a": 1}'), call("call_0", "add", '{"a": 2}')]
    stack.upstream.script(reply({"role": "assistant", "content": None, "tool_calls": calls}))
    message = (await client.chat.completions.create(model="default", messages=HELLO)).choices[0].message
    first, second = (each.id for each in message.tool_calls or ())
    assert first != second
    results: Any = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in ((second, "2"), (first, "1"))]
    echo: Any = message.model_dump(exclude_none=True)
    await client.chat.completions.create(model="default", messages=[*HELLO, echo, *results])
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    (transition, _) = (await stack.episode(key)).transitions
    assert [(each.arguments, each.result) for each in transition.tool_results] == [
        ({"a": 1}, "1"),
        ({"a": 2}, "2"),
    ]


async def test_half_a_surrogate_pair_is_no_reason_to_refuse_an_episode(stack: Stack) -> None:
    """A tool that cuts a text in the middle of an emoji writes one, and every later request repeats it."""
    key = await stack.lease()
    cut = "a\ud83c"
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": cut}]}),
        ("completions", {"prompt": cut}),
        ("responses", {"input": cut}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": cut}]}),
    ):
        response = await post(stack, f"{stack.url(key)}/{path}", json.dumps({"model": "default", **body}).encode())
        assert response.status_code == 200, path
    assert [each.request["messages"][0]["content"] for each in await stack.calls(key)] == ["a\ufffd"] * 4
    whole = json.dumps({"model": "default", "messages": [{"role": "user", "content": "🌍 \\ud83c " + cut}]})
    await post(stack, f"{stack.url(key)}/chat/completions", whole.encode())
    assert (await stack.calls(key))[-1].request["messages"][0]["content"] == "🌍 \\ud83c a\ufffd"
