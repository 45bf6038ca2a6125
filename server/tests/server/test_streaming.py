"""Replies that are passed on as they are sampled: what the client gets when, and what is recorded of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from agl_core.apis.reply import read_reply
from agl_core.apis.streamed import StreamedCompletion
from agl_core.testing.scripts import CallTools, Drop, Fail, Hold, Raw, Say
from agl_core.testing.upstream import END_TOKEN
from agl_core.types import AttemptKey, FinishReason
from agl_server.testing import Stack, running_stack, until

from .all_clients import STREAMING, Gets
from .server_aids import GOOD, SMALLEST, chunks_of, client_of, clients_waiting, closed, open_attempt, post

LONG = Say("A long text that goes out in many pieces, one after the other.")
REQUESTS = {**SMALLEST, "messages": {**GOOD, "max_tokens": 999}}
"""A request of each API, by its route."""
every_route = pytest.mark.parametrize("route", REQUESTS)


@contextlib.asynccontextmanager
async def asking(stack: Stack, key: AttemptKey, route: str = "chat/completions") -> AsyncIterator[AsyncIterator[str]]:
    """A request for a stream: the lines that come of it; the client leaves with the block."""
    headers, body = {"Authorization": f"Bearer {stack.key(key)}"}, {**REQUESTS[route], "stream": True}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{stack.url(key)}/{route}", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        yield response.aiter_lines()


async def first_text(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        if "A long" in line:
            return


async def streamed(stack: Stack, key: AttemptKey, route: str = "chat/completions") -> str:
    async with asking(stack, key, route) as lines:
        return "\n".join([line async for line in lines])


@every_route
async def test_text_comes_before_the_reply_has_ended(stack: Stack, key: AttemptKey, route: str) -> None:
    hold = Hold(LONG, after=4)
    stack.upstream.script(hold)
    async with asking(stack, key, route) as lines:
        await first_text(lines)
        assert not hold.release.is_set()
        assert await stack.calls(key) == []
        hold.release.set()
        rest = [line async for line in lines if line]
    assert ("[DONE]" in rest[-1]) or ("response.completed" in rest[-1]) or ("message_stop" in rest[-1])
    (call,) = await stack.calls(key)
    assert (call.choices[0].message["content"], call.undelivered) == (LONG.text, False)


@every_route
async def test_a_client_that_leaves_early_ends_the_sampling(stack: Stack, key: AttemptKey, route: str) -> None:
    hold = Hold(LONG, after=4)
    stack.upstream.script(hold)
    async with asking(stack, key, route) as lines:
        await first_text(lines)
        await hold.arrived.wait()
    hold.release.set()
    await until(lambda: stack.upstream.cut)
    async with asyncio.timeout(20):
        while not (calls := await stack.calls(key)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (call,) = calls
    (choice,) = call.choices
    assert (call.undelivered, call.late, choice.finish_reason) == (True, False, FinishReason.ABORTED)
    whole = [*LONG.text.encode(), END_TOKEN]
    assert 0 < len(choice.response_ids) < len(whole)
    assert choice.response_ids.tolist() == whole[: len(choice.response_ids)]
    assert len(choice.logprobs) == len(choice.response_ids)
    assert LONG.text.startswith(str(choice.message["content"]))
    await streamed(stack, key, route)
    assert [call.undelivered for call in await stack.calls(key)] == [True, False]
    episode = await closed(stack, key)
    assert (len(episode.transitions), len(episode.undelivered)) == (1, 1)


async def chat_error(stack: Stack, key: AttemptKey) -> str:
    with pytest.raises(openai.APIError) as raised:
        async for _ in await stack.client(key).chat.completions.create(**GOOD, stream=True):
            pass
    return raised.value.message


async def response_error(stack: Stack, key: AttemptKey) -> str:
    events = [event async for event in await stack.client(key).responses.create(model="m", input="x", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "error"
    return events[-1].message


async def message_error(stack: Stack, key: AttemptKey) -> str:
    with pytest.raises(anthropic.APIStatusError) as raised:
        async with client_of(stack, key).messages.stream(**GOOD, max_tokens=9) as stream:
            await stream.get_final_message()
    return str(raised.value)


@pytest.mark.parametrize("error_of", [chat_error, response_error, message_error])
@pytest.mark.parametrize(
    ("failure", "says"), [(Drop(after=3), "broke off"), (Fail(500, after=3), "scripted failure"), (None, "not record")]
)
async def test_what_fails_after_the_first_event_ends_in_the_apis_own_error(
    stack: Stack, key: AttemptKey, error_of: Any, failure: Any, says: str
) -> None:
    if failure is None:
        stack.store.failing = True
    else:
        stack.upstream.script(failure)
    assert says in await error_of(stack, key)
    stack.store.failing = False
    assert await stack.calls(key) == []
    attempt = open_attempt(stack.server.queue, key)
    assert says in str(attempt.last_failure)
    assert attempt.interrupted is (failure is None)
    assert attempt.gone_after == 0
    assert "[DONE]" in await streamed(stack, key)


async def test_what_fails_before_the_first_event_has_a_status(stack: Stack, key: AttemptKey) -> None:
    for failure, status in ((Fail(429), 429), (Drop(), 502), (Raw(b"{}"), 502)):
        stack.upstream.script(failure)
        assert (await post(stack, key, {**GOOD, "stream": True})).status_code == status


async def test_a_stream_that_stops_is_given_up() -> None:
    async with running_stack(timeout=0.2) as stack:
        stack.upstream.script(Hold(after=3))
        assert "did not answer" in await chat_error(stack, await stack.lease())


async def test_a_retry_joins_the_stream_in_flight(stack: Stack, key: AttemptKey) -> None:
    hold = Hold(LONG)
    stack.upstream.script(hold)

    async def ask() -> tuple[str, str]:
        client = stack.client(key, timeout=0.3, max_retries=9)
        chunks = [chunk async for chunk in await client.chat.completions.create(**GOOD, stream=True)]
        return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    joined = asyncio.create_task(ask())
    await until(lambda: clients_waiting(stack, key) > 1)
    hold.release.set()
    reply_id, text = await joined
    assert text == LONG.text
    assert len(stack.upstream.received) == 1
    (call,) = await stack.calls(key)
    assert (call.id, call.undelivered) == (reply_id, False)


def text_of(stream: str) -> str:
    """The text of a stream of chat completions."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks_of(stream))


@pytest.mark.parametrize("returns_ids", [False, True])
async def test_model_servers_without_ids_or_streams(returns_ids: bool) -> None:
    """A server may also answer with a whole reply though a stream was asked for."""
    async with running_stack() as stack:
        key = await stack.lease()
        stack.upstream.returns_ids = returns_ids
        for streams in (True, False):
            stack.upstream.streams = streams
            stack.upstream.script(LONG)
            assert text_of(await streamed(stack, key)) == LONG.text
            call = (await stack.calls(key))[-1]
            assert call.choices[0].message["content"] == LONG.text
            assert (call.prompt_ids is not None) is returns_ids
            assert (call.choices[0].response_ids is not None) is returns_ids
            assert (call.choices[0].logprobs is not None) is returns_ids
    async with running_stack(upstream_fields=lambda _: {"streams": False, "returns_ids": False}) as stack:
        stack.upstream.script(LONG)
        assert text_of(await streamed(stack, await stack.lease())) == LONG.text
        assert not {"stream", "return_token_ids", "logprobs"} & stack.upstream.received[0].body.keys()


def chunk(**delta: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}


def tool(index: int, text: str, **more: Any) -> dict[str, Any]:
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"tool_calls": [{"index": index, **more, "function": {**name, "arguments": text}}]}


UNUSUAL: dict[str, tuple[list[dict[str, Any]], Gets]] = {
    "texts and calls in turn": (
        [
            chunk(role="assistant", content="one "),
            chunk(reasoning_content="hm "),
            chunk(content="two "),
            chunk(**tool(0, '{"a":', id="c0", name="add")),
            chunk(**tool(0, " 1}")),
            chunk(content="three"),
            chunk(reasoning_content="hm"),
        ],
        ("one two three", "hm hm", [{"a": 1}]),
    ),
    "calls that are mixed, with one id, and no arguments": (
        [
            chunk(**tool(0, '{"a"', id="c", name="add")),
            chunk(**tool(1, "", id="c", name="add")),
            chunk(**tool(0, ": 1}")),
        ],
        ("", "", [{"a": 1}, {}]),
    ),
    "calls without ids, numbers from 1, and names that come again": (
        [chunk(**tool(1, "{", name="add")), chunk(**tool(1, "}", name="add")), chunk(**tool(2, "{}", name="add"))],
        ("", "", [{}, {}]),
    ),
    "calls without an index": (
        [
            chunk(tool_calls=[{"id": f"c{place}", "function": {"name": name, "arguments": "{}"}}])
            for place, name in enumerate(("add", "find", "add"))
        ],
        ("", "", [{}, {}, {}]),
    ),
    "calls without an index or ids": (
        [
            chunk(tool_calls=[{"function": {"name": "add", "arguments": '{"a"'}}]),
            chunk(tool_calls=[{"function": {"arguments": ": 1}"}}]),
            chunk(tool_calls=[{"function": {"name": "add", "arguments": {"b": 2}}}]),
        ],
        ("", "", [{"a": 1}, {"b": 2}]),
    ),
    "calls that all have the index 0": (
        [
            chunk(**tool(0, '{"a"', id="c0", name="add")),
            chunk(**tool(0, ": 1}", id="made-up")),
            chunk(**tool(0, '{"b": 2}', id="c1", name="add")),
        ],
        ("", "", [{"a": 1}, {"b": 2}]),
    ),
    "calls that all have the index 0, and no ids": (
        [
            chunk(**tool(0, '{"a"', name="add")),
            chunk(**tool(0, ": 1}", name="add")),
            chunk(**tool(0, "", name="add")),
            chunk(**tool(0, '{"b": 2}', id="", name="add")),
            chunk(**tool(0, '{"c": 3}', id="", name="find")),
        ],
        ("", "", [{"a": 1}, {"b": 2}, {"c": 3}]),
    ),
    "calls that all have the index 0, whose arguments name them by id": (
        [
            chunk(**tool(0, "", id="c0", name="add")),
            chunk(**tool(0, "", id="c1", name="find")),
            chunk(**tool(0, '{"a": 1}', id="c0")),
            chunk(**tool(0, '{"b": 2}', id="c1")),
        ],
        ("", "", [{"a": 1}, {"b": 2}]),
    ),
    "calls that are mixed with each other and with text": (
        [
            chunk(**tool(0, "", id="c0", name="add")),
            chunk(**tool(1, '{"b"', id="c1", name="add")),
            chunk(content="one"),
            chunk(**tool(0, '{"a": 1}')),
            chunk(**tool(1, ": 2}")),
        ],
        ("one", "", [{"a": 1}, {"b": 2}]),
    ),
    "a name in two pieces": (
        [chunk(**tool(0, "", id="c0", name="a")), chunk(**tool(0, "", name="dd")), chunk(**tool(0, "{}"))],
        ("", "", [{}]),
    ),
    "reasoning under both of its names": (
        [chunk(reasoning_content="hm ", reasoning="hm "), chunk(reasoning="hm", reasoning_content="hm")],
        ("", "hm hm", []),
    ),
    "nothing": ([chunk(role="assistant"), chunk(content=None)], ("", "", [])),
}
WRITTEN: dict[str, Callable[[str], str]] = {
    "as usual": lambda events: events,
    "with a byte order mark": lambda events: f"\ufeff{events}",
    "each event on several lines": lambda events: events.replace('"choices": ', '"choices":\r\ndata: '),
    "without an end": lambda events: events.removesuffix("\n\ndata: [DONE]\n\n"),
}


@pytest.mark.parametrize(
    ("name", "written"), [*((name, "as usual") for name in UNUSUAL), *(("texts and calls in turn", w) for w in WRITTEN)]
)
async def test_unusual_streams_reach_every_client_and_come_back_as_one_message(
    monkeypatch: pytest.MonkeyPatch, name: str, written: str
) -> None:
    chunks, expected = UNUSUAL[name]
    ids = {"prompt_token_ids": [1, 2]}
    reasons = ["tool_calls", "stop"] if expected[2] else ["stop"]
    ends = [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]} for reason in reasons]
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunks[0] | ids, *chunks[1:], *ends))
    events = WRITTEN[written](events + "data: [DONE]\n\n")
    async with running_stack() as stack:
        encode = stack.upstream.encode
        monkeypatch.setattr(
            stack.upstream, "encode", lambda *args, streamed: events if streamed else encode(*args, streamed=streamed)
        )
        key = await stack.lease()
        for ask in STREAMING:
            assert await ask(stack, key) == expected
        for call in await stack.calls(key):
            (choice,) = call.choices
            assert (call.prompt_ids.tolist(), choice.finish_reason) == ([1, 2], FinishReason(reasons[0]))
            own = choice.message.get("tool_calls") or ()
            assert (choice.message.get("content") or "") == expected[0]
            assert len({call["id"] for call in own}) == len(expected[2])
            assert {call["function"]["name"] for call in own} <= {"add", "find"}
        client = stack.client(key)
        async with client.responses.stream(model="m", input="x") as stream:
            response: Any = await stream.get_final_response()
        items = [item for item in response.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "1"} for item in items]
        await client.responses.create(model="m", input=[{"role": "user", "content": "x"}, *response.output, *results])
        echoed = stack.upstream.received[-1].body["messages"][1]
        assert (echoed.get("content") or "") == expected[0]
        assert len(echoed.get("tool_calls") or ()) == len(expected[2])


async def test_a_tools_name_comes_before_its_arguments(stack: Stack, key: AttemptKey) -> None:
    hold = Hold(CallTools([("add", {"text": "x" * 400})]), after=4)  # type: ignore[arg-type]
    stack.upstream.script(hold)
    async with client_of(stack, key) as client, client.messages.stream(**GOOD, max_tokens=999) as stream:
        async for event in stream:
            if event.type == "content_block_start":
                assert event.content_block.type == "tool_use"
                hold.release.set()
        (block,) = (await stream.get_final_message()).content
    assert block.type == "tool_use"
    assert block.input == {"text": "x" * 400}


def test_fields_that_no_api_of_today_streams_are_whole_in_the_record() -> None:
    completion = StreamedCompletion("x")
    for text in ('{"a":', " 1}"):
        called = {"name": "add", "arguments": text} if text.startswith("{") else {"arguments": text}
        completion.add(chunk(function_call=called, reasoning_details=[{"text": text}]))
    (choice,) = json.loads(completion.whole())["choices"]
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["message"]["reasoning_details"] == [{"text": '{"a":'}, {"text": " 1}"}]


def test_a_token_takes_little_memory_until_the_reply_ends() -> None:
    entry = {"token": "word", "logprob": -0.25, "bytes": [119, 111, 114, 100], "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "word "}, "logprobs": {"content": [entry]}, "token_ids": [70_000]}
    chunk, tokens = json.dumps({"id": "x", "choices": [choice]}), 3000
    completion = StreamedCompletion("x")
    tracemalloc.start()
    for _ in range(tokens):
        completion.add(json.loads(chunk))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / tokens < 300
    (whole,) = read_reply(completion.whole(), {}, "x", logprobs=True).choices
    assert whole.response_ids is not None
    assert whole.logprobs is not None
    assert (len(whole.response_ids), whole.logprobs.tolist()) == (tokens, [-0.25] * tokens)
