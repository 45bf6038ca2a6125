"""The Responses API through the gateway, by the official client: how calls end, and what an agent sends back of one."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from agl_core.capture.requests import HEADER_IGNORED
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import AttemptKey, Ending
from agl_core.wire import CloseRequest
from agl_server.testing import Stack

from ..server_aids import OWN, assistant, call, client_of, forwarded, reply

GOOD: dict[str, Any] = {"model": "default", "input": "hello"}
PARALLEL = OWN["text and parallel calls"]


def user() -> Any:
    """A user's message; a new one each time, for instrumented clients write into what they are given."""
    return {"role": "user", "content": "go"}


def outputs(response: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"did {item.call_id}"}
        for item in response.output
        if item.type == "function_call"
    ]


def tool_messages(own: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": tool_call["id"], "content": f"did {tool_call['id']}"}
        for tool_call in own.get("tool_calls") or ()
    ]


async def test_a_reply_that_was_cut_short_is_incomplete(client: AsyncOpenAI) -> None:
    response = await client.responses.create(**GOOD, max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "You "
    events = [event async for event in await client.responses.create(**GOOD, max_output_tokens=4, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_logprobs_go_to_clients_that_ask(stack: Stack, client: AsyncOpenAI) -> None:
    stack.upstream.script(*[Say("ab")] * 2)
    request: dict[str, Any] = {**GOOD, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await client.responses.create(**request)
    part: Any = response.output[0]
    logprobs = part.content[0].logprobs
    assert [token.logprob for token in logprobs] == [logprob(token) for token in [*b"ab", END_TOKEN]]
    assert len(logprobs[0].top_logprobs) == 2
    streamed = [event async for event in await client.responses.create(**request, stream=True)]
    deltas = [event for event in streamed if event.type == "response.output_text.delta"]
    assert [token.logprob for delta in deltas for token in delta.logprobs] == [token.logprob for token in logprobs]
    assert streamed[-1].response.output[0].content == part.content
    plain: Any = (await client.responses.create(**GOOD)).output[0]
    assert plain.content[0].logprobs == []


async def ask(client: openai.AsyncOpenAI, streamed: bool, **request: Any) -> Any:
    """The reply to the request, as a whole or as the last event of its stream."""
    if streamed:
        return [event async for event in await client.responses.create(**request, stream=True)][-1].response
    return await client.responses.create(**request)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_comes_back_as_the_upstreams_own_message(stack: Stack, streamed: bool) -> None:
    """The agent may send items, the items' ids, or the id of the response."""
    for name, original in OWN.items():
        key, own = await stack.lease(), dict(original)
        client = stack.client(key)
        stack.upstream.script(reply(own))
        response = await ask(client, streamed, model="m", input=[user()])
        if streamed and own.get("tool_calls"):  # A stream does not show whether there is no text or an empty one.
            own["content"] = own["content"] or None
        references = [{"type": "item_reference", "id": item.id} for item in response.output]
        wanted = [user(), own, *tool_messages(own), user()]
        for again in (
            {"input": [user(), *response.output, *outputs(response), user()]},
            {"input": [user(), *references, *outputs(response), user()]},
            {"input": [user(), *({"id": reference["id"]} for reference in references), *outputs(response), user()]},
            {"input": [*outputs(response), user()], "previous_response_id": response.id},
        ):
            raw = await client.responses.with_raw_response.create(model="m", **again)
            assert forwarded(stack) == (await stack.calls(key))[-1].request["messages"] == wanted, name
            assert HEADER_IGNORED not in raw.headers


async def test_replies_whose_tool_calls_have_the_same_ids_stay_apart(stack: Stack, client: AsyncOpenAI) -> None:
    first, second = (assistant(None, call("call_0", "add", arguments)) for arguments in "12")
    items: list[Any] = [user()]
    for own in (first, second):
        stack.upstream.script(reply(own))
        response: Any = await client.responses.create(model="m", input=items)
        bare = [{k: v for k, v in item.model_dump().items() if k != "id"} for item in response.output]
        items += [*bare, *outputs(response)]
    await client.responses.create(model="m", input=items)
    assert forwarded(stack) == [user(), first, *tool_messages(first), second, *tool_messages(second)]


async def test_each_earlier_response_can_be_continued(stack: Stack, client: AsyncOpenAI) -> None:
    ids: list[Any] = [None]
    for turn in range(3):
        stack.upstream.script(Say(f"a{turn}"))
        request: dict[str, Any] = {"input": f"q{turn}", "instructions": f"i{turn}", "previous_response_id": ids[-1]}
        response = await client.responses.create(model="m", **request)
        assert response.previous_response_id == ids[-1]
        ids.append(response.id)
    assert [message["content"] for message in forwarded(stack)] == ["i2", "q0", "a0", "q1", "a1", "q2"]
    await client.responses.create(model="m", input="other", previous_response_id=ids[1])
    assert [message["content"] for message in forwarded(stack)] == ["q0", "a0", "other"]


async def test_a_response_of_elsewhere_cannot_be_continued(stack: Stack, client: AsyncOpenAI) -> None:
    unstored = await client.responses.create(model="m", input="x", store=False)
    referred: Any = {"type": "item_reference", "id": unstored.output[0].id}
    await client.responses.create(model="m", input=[user(), referred, user()])
    assert [message["role"] for message in forwarded(stack)] == ["user", "assistant", "user"], (
        "its items are known all the same"
    )
    other = await stack.client(await stack.lease()).responses.create(model="m", input="x")
    for previous in (unstored.id, other.id, "resp_x"):
        with pytest.raises(openai.BadRequestError, match="Send the whole input") as raised:
            await client.responses.create(model="m", input="y", previous_response_id=previous)
        assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_message_that_is_forgotten_with_one_reply_is_still_known_of_another(
    stack: Stack, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_core.apis.answered.MAX_KEPT", 2)
    for _ in range(4):
        stack.upstream.script(reply(PARALLEL))
        response = await client.responses.create(model="m", input=[user()])
    await client.responses.create(model="m", input=[user(), *response.output, *outputs(response)])
    assert forwarded(stack) == [user(), PARALLEL, *tool_messages(PARALLEL)]


async def parallel(stack: Stack, key: AttemptKey) -> list[dict[str, Any]]:
    """Input items of a reply with three parallel calls, as a client holds them."""
    stack.upstream.script(reply(PARALLEL))
    response = await stack.client(key).responses.create(model="m", input=[user()])
    return [item.model_dump(exclude_unset=True) for item in response.output]


async def test_parallel_calls_stay_together_however_they_come_back(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI
) -> None:
    text, *calls = await parallel(stack, key)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"did {item['call_id']}"}
        for item in calls
    ]
    interleaved = [text, *(item for pair in zip(calls, results, strict=True) for item in pair)]
    bare = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in interleaved]
    easy = [{"role": "assistant", "content": text["content"][0]["text"]}, *bare[1:]]
    for echo in (interleaved, bare, easy, [text, *calls, *results]):
        await client.responses.create(model="m", input=[user(), *echo])
        assert forwarded(stack) == [user(), PARALLEL, *tool_messages(PARALLEL)]


async def test_calls_are_told_apart_by_reply(stack: Stack, key: AttemptKey, client: AsyncOpenAI) -> None:
    """A text, and then calls of the next reply: two messages, though nothing stands between them."""
    stack.upstream.script(Say("one"), CallTools([("add", {})]))
    first = await client.responses.create(model="m", input=[user()])
    second = await client.responses.create(model="m", input=[user(), *first.output])
    await client.responses.create(model="m", input=[user(), *first.output, *second.output, *outputs(second)])
    text, called = (recorded.choices[0].message for recorded in (await stack.calls(key))[:2])
    assert [message["content"] for message in forwarded(stack)[1:3]] == ["one", None]
    assert forwarded(stack)[1:3] == [
        {"role": "assistant", "content": text["content"]},
        {"role": "assistant", "content": None, "tool_calls": called["tool_calls"]},
    ]


async def test_content_is_passed_on_in_parts(stack: Stack, client: AsyncOpenAI) -> None:
    image = "data:image/png;base64,AAAA"
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "one"}]},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": image, "detail": "low"},
            ],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
    ]
    await client.responses.create(model="m", input=parts)
    assert forwarded(stack) == [
        {"role": "developer", "content": "one"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
            ],
        },
        {"role": "assistant", "content": "no"},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ]


async def test_reasoning_without_its_text_is_the_replys_own_or_left_out(stack: Stack, client: AsyncOpenAI) -> None:
    own = OWN["reasoning"]
    stack.upstream.script(reply(own))
    response: Any = await client.responses.create(model="m", input=[user()], store=False)
    reasoning, text = (item.model_dump() for item in response.output)
    bare = {"type": "reasoning", "id": reasoning["id"], "summary": [], "encrypted_content": None}
    await client.responses.create(model="m", input=[user(), bare, text, user()])
    assert forwarded(stack)[1] == own
    stack.upstream.script(reply(own))
    sealed: Any = await client.responses.create(
        model="m", input=[user()], store=False, include=["reasoning.encrypted_content"]
    )
    assert sealed.output[0].encrypted_content
    answer: Any = {"role": "assistant", "content": own["content"]}
    stateless: Any = {"type": "reasoning", "summary": [], "encrypted_content": sealed.output[0].encrypted_content}
    await client.responses.create(model="m", input=[user(), stateless, answer, user()])
    assert forwarded(stack)[1] == own
    foreign = {**bare, "id": "rs_68a", "encrypted_content": "x"}
    raw = await client.responses.with_raw_response.create(model="m", input=[user(), foreign, text, user()])
    assert forwarded(stack)[1] == {"role": "assistant", "content": own["content"]}
    assert raw.headers[HEADER_IGNORED] == "input.reasoning"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_can_be_fetched_until_it_is_deleted(stack: Stack, client: AsyncOpenAI, streamed: bool) -> None:
    request: dict[str, Any] = {"model": "m", "input": [user()], "instructions": "Be brief."}
    response = await ask(client, streamed, **request)
    assert await client.responses.retrieve(response.id) == response
    events: list[Any] = [event async for event in await client.responses.retrieve(response.id, stream=True)]
    assert (events[0].type, events[-1].response) == ("response.created", response)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(response.id, stream=True, starting_after=3)
    with pytest.raises(openai.NotFoundError, match="does not serve GET"):
        await client.responses.input_items.list(response.id)
    echo: Any = [user(), *response.output, user()]
    await client.responses.delete(response.id)
    for asking in (client.responses.retrieve(response.id), client.responses.delete(response.id)):
        with pytest.raises(openai.NotFoundError, match="agl keeps the last") as raised:
            await asking
        assert raised.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="m", input="y", previous_response_id=response.id)
    await client.responses.create(model="m", input=echo)
    unstored = await client.responses.create(**request, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)
    other = stack.client(await stack.lease())
    stored = await client.responses.create(**request)
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(stored.id)


async def test_tokens_are_counted_and_not_recorded(stack: Stack, key: AttemptKey) -> None:
    client, anthropics = stack.client(key), client_of(stack, key)
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {}, "strict": True}]
    counted = await client.responses.input_tokens.count(model="m", input="hello", tools=tools)
    called = await client.responses.create(model="m", input="hello", tools=tools)
    assert counted.input_tokens == called.usage.input_tokens > 0
    request: Any = {"model": "m", "messages": [user()], "system": "Be brief."}
    also = await anthropics.messages.count_tokens(**request)
    message = await anthropics.messages.create(max_tokens=9, **request)
    assert also.input_tokens == message.usage.input_tokens > 0
    assert [call.id for call in await stack.calls(key)] == [called.id, message.id]
    assert stack.upstream.received[0].body["max_tokens"] == 1
    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    [attempt] = await stack.store.attempts(key.rollout)
    assert attempt.passed_through == {"responses/input_tokens": 1, "messages/count_tokens": 1}


async def test_what_is_kept_of_all_open_attempts_is_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt that was not used for longest loses it: that costs a call anew, or a clear refusal, and no call."""
    monkeypatch.setattr("agl_core.apis.answered.MAX_TOTAL_BYTES", 60_000)
    text = 4000 * " "
    keys = [await stack.lease() for _ in range(8)]
    clients = [stack.client(key) for key in keys]
    responses = [
        await client.responses.create(model="m", input=f"{text}{number}") for number, client in enumerate(clients)
    ]
    again = [
        await client.responses.create(
            model="m", input=f"{text}{number}", extra_headers={"x-stainless-retry-count": "1"}
        )
        for number, client in reversed([*enumerate(clients)])
    ][::-1]
    same = [first.id == second.id for first, second in zip(responses, again, strict=True)]
    assert (same[0], same[-1]) == (False, True)
    assert [len(await stack.calls(key)) for key in keys] == [1 if kept else 2 for kept in same]
    await clients[0].responses.create(model="m", input="go on", previous_response_id=again[0].id)
    with pytest.raises(openai.BadRequestError, match="256 MiB of all attempts"):
        await clients[-1].responses.create(model="m", input="go on", previous_response_id=again[-1].id)
