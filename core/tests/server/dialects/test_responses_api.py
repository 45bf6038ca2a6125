"""The Responses API through the gateway, by the official client and by hand."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agl_core.testing.scripts import OVERFLOW, Raw, Say
from agl_core.testing.server import Stack
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import AttemptKey, Mode

from ..api_oracles import OWN, events_of, extras, reply
from ..posting import post

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
CHAT_ADD = {"type": "function", "function": {name: value for name, value in ADD.items() if name != "type"}}
GOOD: dict[str, Any] = {"model": "default", "input": "hello"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def test_a_response_is_recorded_exactly_as_sampled(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Say("four"))
    response = await stack.client(key).responses.create(**GOOD, instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "four"
    assert (response.status, response.model, response.instructions) == ("completed", "default", "Be brief.")
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (5, response.usage.input_tokens + 5)
    (call,) = await stack.calls(key)
    (choice,) = call.choices
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (call.id, call.api) == (response.id, "responses")
    assert response.id.startswith("resp_")
    assert call.request == {"model": "default", "metadata": {"a": "b"}, "messages": messages}
    assert choice.response_ids is not None
    assert choice.response_ids.tolist() == [*b"four", END_TOKEN]
    (received,) = stack.upstream.received
    assert received.body["messages"] == messages
    assert not {"input", "instructions", "store"} & set(received.body)


async def test_what_is_asked_is_translated(stack: Stack) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    await stack.client(key).responses.create(
        **GOOD,
        tools=[ADD],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=77,
        temperature=0.3,
        top_p=0.9,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}, "verbosity": "low"},
        user="me",
        store=False,
        truncation="disabled",
        extra_body={"invented": 1, "seed": 5},
    )
    (received,) = stack.upstream.received
    asked = {
        "tools": [CHAT_ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "max_tokens": 77,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "verbosity": "low",
        "user": "me",
        "invented": 1,
    }
    own = {"model", "messages", "temperature", "top_p", "seed", "return_token_ids", "logprobs"}
    assert {name: value for name, value in received.body.items() if name not in own} == asked
    (call,) = await stack.calls(key)
    sampling = call.requested
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.3, 0.9, 77, 5)
    assert call.request["tools"] == [CHAT_ADD]


async def test_replies_and_streams_fit_the_schema_and_have_no_extras(stack: Stack) -> None:
    key = await stack.lease()
    for name in OWN:
        await _fits(stack, key, name)


async def _fits(stack: Stack, key: AttemptKey, name: str) -> None:
    asked = {**GOOD, "tools": [ADD], "include": ["message.output_text.logprobs"]}
    stack.upstream.script(*[reply(OWN[name])] * 2)
    whole = (await post(stack, f"{stack.url(key)}/responses", json.dumps(asked).encode())).text
    response = Response.model_validate_json(whole)
    assert list(extras(response)) == []
    streamed = (await post(stack, f"{stack.url(key)}/responses", json.dumps({**asked, "stream": True}).encode())).text
    events = [EVENTS.validate_python(each) for each in events_of(streamed)]
    assert [found for event in events for found in extras(event)] == []
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.type for event in events if "delta" in event.type} == {
        f"response.{kind}.delta"
        for kind, said in (
            ("reasoning_text", OWN[name].get("reasoning") or OWN[name].get("reasoning_content")),
            ("output_text", OWN[name]["content"]),
            ("function_call_arguments", OWN[name].get("tool_calls")),
        )
        if said
    }
    last = events[-1].response
    assert last.id != response.id
    assert [_without_ids(item) for item in last.output] == [_without_ids(item) for item in response.output]


def _without_ids(item: BaseModel) -> dict[str, Any]:
    return item.model_dump(exclude={"id"})


async def test_a_reply_that_was_cut_short_is_incomplete(stack: Stack) -> None:
    key = await stack.lease()
    client = stack.client(key)
    response = await client.responses.create(**GOOD, max_output_tokens=4)
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "You "
    events = [event async for event in await client.responses.create(**GOOD, max_output_tokens=4, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_structured_output_is_parsed(stack: Stack) -> None:
    class Joke(BaseModel):
        setup: str
        rating: int

    key = await stack.lease()
    response = await stack.client(key).responses.parse(**{**GOOD, "input": "I give 'it' 7."}, text_format=Joke)
    assert response.output_parsed == Joke(setup="it", rating=7)
    async with stack.client(key).responses.stream(**{**GOOD, "input": "'it' 7"}, text_format=Joke) as stream:
        assert (await stream.get_final_response()).output_parsed == Joke(setup="it", rating=7)
    assert stack.upstream.received[0].body["response_format"]["json_schema"]["name"] == "Joke"


async def test_logprobs_go_to_clients_that_ask(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(*[Say("ab")] * 2)
    asked: dict[str, Any] = {**GOOD, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await stack.client(key).responses.create(**asked)
    part: Any = response.output[0]
    logprobs = part.content[0].logprobs
    assert [each.logprob for each in logprobs] == [logprob(each) for each in [*b"ab", END_TOKEN]]
    assert len(logprobs[0].top_logprobs) == 2
    streamed = [event async for event in await stack.client(key).responses.create(**asked, stream=True)]
    (delta,) = [event for event in streamed if event.type == "response.output_text.delta"]
    assert [each.logprob for each in delta.logprobs] == [each.logprob for each in logprobs]
    plain: Any = (await stack.client(key).responses.create(**GOOD)).output[0]
    assert plain.content[0].logprobs == []


async def test_null_and_what_asks_for_nothing_is_absent(stack: Stack) -> None:
    url = f"{stack.url(await stack.lease())}/responses"
    names = {"instructions", "previous_response_id", "tools", "tool_choice", "text", "reasoning", "include", "prompt"}
    nothing = {"background": False, "truncation": "disabled", "include": [], "text": {"format": {"type": "text"}}}
    for change in (dict.fromkeys(names), nothing, {"reasoning": {"effort": None, "summary": None}, "tools": []}):
        response = await post(stack, url, json.dumps({**GOOD, **change}).encode())
        assert response.status_code == 200, response.text
        Response.model_validate_json(response.text)
    own = {"model", "messages", "temperature", "top_p", "max_tokens", "seed", "return_token_ids", "logprobs"}
    assert all(set(received.body) == own for received in stack.upstream.received)


async def test_errors_are_openais(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(OVERFLOW)
    with pytest.raises(openai.BadRequestError) as raised:
        await stack.client(key).responses.create(**GOOD)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError, match="OPENAI_API_KEY"):
        await stack.client(key, api_key="nonsense").responses.create(**GOOD)
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/chat/completions, /v1/responses"):
        await stack.client(key).responses.compact(model="default", input="x")
    stack.upstream.script(Raw(b"{}"))
    with pytest.raises(openai.InternalServerError, match="not a chat completion"):
        await stack.client(key, max_retries=0).responses.create(**GOOD)
