"""The Messages API through the gateway, by Anthropic's client and by hand."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from agl_core.testing.scripts import OVERFLOW, Fail, Raw
from agl_core.testing.server import Stack
from agl_core.testing.upstream import END_TOKEN
from agl_core.types import Mode

from ..api_oracles import HELLO, OWN, client_of, events_of, extras, post_each, reply

GOOD: dict[str, Any] = {"model": "default", "max_tokens": 100, "messages": HELLO}
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CHAT_ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": ADD["input_schema"]},
}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


async def test_a_message_is_recorded_exactly_as_sampled(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(reply(OWN["text"]))
    message = await client_of(stack, key).messages.create(
        **GOOD, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    )
    assert [block.type for block in message.content] == ["text"]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "default", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (20, 10)
    assert usage.output_tokens == len(OWN["text"]["content"].encode()) + 1
    (call,) = await stack.calls(key)
    (choice,) = call.choices
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (call.id, call.api, call.version) == (message.id, "messages", 3)
    assert message.id.startswith("msg_")
    assert call.request == {"model": "default", "max_tokens": 100, "messages": messages}
    assert choice.response_ids is not None
    assert choice.response_ids.tolist() == [*OWN["text"]["content"].encode(), END_TOKEN]
    assert stack.upstream.received[0].body["messages"] == messages


async def test_what_is_asked_is_translated(stack: Stack) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    choices: dict[str, tuple[Any, Any]] = {
        "auto": ({"type": "auto"}, "auto"),
        "any": ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        "tool": ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        "none": ({"type": "none"}, "none"),
    }
    for name, (choice, wanted) in choices.items():
        await client_of(stack, key).messages.create(
            **GOOD,
            tools=[{**ADD, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
            tool_choice=choice,
            stop_sequences=["END"],
            metadata={"user_id": "me"},
            thinking={"type": "disabled"},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            extra_body={"invented": 1, "temperature": 0.3, "top_p": 0.9, "top_k": 5},
        )
        asked = {
            "tools": [CHAT_ADD],
            "tool_choice": wanted,
            **({"parallel_tool_calls": False} if name == "any" else {}),
            "max_tokens": 100,
            "top_k": 5,
            "stop": ["END"],
            "metadata": {"user_id": "me"},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
            },
            "reasoning_effort": "low",
            "invented": 1,
        }
        own = {"model", "messages", "temperature", "top_p", "seed", "return_token_ids", "logprobs"}
        body = stack.upstream.received[-1].body
        assert {name: value for name, value in body.items() if name not in own} == asked, name
    sampling = (await stack.calls(key))[0].requested
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.9, 100)
    await client_of(stack, await stack.lease()).messages.create(**GOOD, extra_body={"top_k": 5})
    assert "top_k" not in stack.upstream.received[-1].body, "it would distort what is trained on"


async def test_messages_and_streams_fit_the_schema_and_have_no_extras(stack: Stack) -> None:
    key = await stack.lease()
    for name, own in OWN.items():
        stack.upstream.script(*[reply(own)] * 2)
        whole, streamed = await post_each(stack, f"{stack.url(key)}/messages", [GOOD, {**GOOD, "stream": True}])
        message = Message.model_validate_json(whole.text)
        assert list(extras(message)) == [], name
        events = [EVENTS.validate_python(each) for each in events_of(streamed.text) if each["type"] != "ping"]
        assert [found for event in events for found in extras(event)] == [], name
        assert streamed.headers["content-type"].startswith("text/event-stream")
        kinds = [event.type for event in events if event.type != "content_block_delta"]
        blocks = ["content_block_start", "content_block_stop"] * len(message.content)
        assert kinds == ["message_start", *blocks, "message_delta", "message_stop"], name


async def test_stop_reasons(stack: Stack) -> None:
    client = client_of(stack, await stack.lease())
    called = OWN["one call"]
    for step, reason in (
        (reply(OWN["text"], "length"), "max_tokens"),
        (reply(OWN["text"], "content_filter"), "refusal"),
        (reply(OWN["text"], stop_reason="END"), "stop_sequence"),
        (reply(OWN["text"], stop_reason=151645), "end_turn"),
        (reply(called, "stop"), "tool_use"),
        (reply(called, "length"), "max_tokens"),
    ):
        stack.upstream.script(step, step)
        message = await client.messages.create(**GOOD)
        async with client.messages.stream(**GOOD) as stream:
            final = await stream.get_final_message()
        assert message.stop_reason == final.stop_reason == reason
        assert message.stop_sequence == final.stop_sequence == ("END" if reason == "stop_sequence" else None)


async def test_the_key_is_taken_from_either_header(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await stack.lease()
    for name, value in (
        ("ANTHROPIC_BASE_URL", stack.url(key).removesuffix("/v1")),
        ("ANTHROPIC_AUTH_TOKEN", stack.key(key)),
    ):
        monkeypatch.setenv(name, value)
    await anthropic.AsyncAnthropic().messages.create(**GOOD)
    both = {"x-api-key": "the user's own"}
    await anthropic.AsyncAnthropic().messages.create(**GOOD, extra_headers=both)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN")
    await anthropic.AsyncAnthropic(api_key=stack.key(key)).messages.create(**GOOD)
    for other in ("nonsense", stack.server.worker_key):
        with pytest.raises(anthropic.AuthenticationError, match="is not the right one") as raised:
            await anthropic.AsyncAnthropic(api_key=other).messages.create(**GOOD)
        assert raised.value.type == "authentication_error"
    right, wrong = {"x-api-key": stack.key(key)}, {"x-api-key": "nonsense"}
    async with httpx.AsyncClient(trust_env=False) as client:
        none, bad, old = [
            await client.post(f"{stack.url(key)}/messages", json=GOOD, headers=headers)
            for headers in ({}, wrong, right)
        ]
    assert (none.status_code, "is missing" in none.text) == (401, True)
    assert (bad.status_code, "is not the right one" in bad.text) == (401, True)
    assert old.status_code == 200, "earlier clients, and those of other languages, send x-api-key"
    assert len(await stack.calls(key)) == 4


async def test_null_means_absent(stack: Stack) -> None:
    url = f"{stack.url(await stack.lease())}/messages"
    names = {"system", "tools", "tool_choice", "output_config", "container", "thread", "stop", "n", "top_p"}
    (response,) = await post_each(stack, url, [{**GOOD, **dict.fromkeys(names)}])
    assert response.status_code == 200, response.text
    own = {"model", "messages", "temperature", "top_p", "max_tokens", "seed", "return_token_ids", "logprobs"}
    assert set(stack.upstream.received[0].body) == own


async def test_errors_are_anthropics(stack: Stack) -> None:
    key = await stack.lease()
    client = client_of(stack, key)
    for step, status, kind in (
        (OVERFLOW, 400, "invalid_request_error"),
        (Fail(429), 429, "rate_limit_error"),
        (Fail(500), 502, "api_error"),
        (Raw(b"{}"), 502, "api_error"),
    ):
        stack.upstream.script(step)
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.create(**GOOD)
        assert (raised.value.status_code, raised.value.type) == (status, kind)
        assert ("prompt is too long" in str(raised.value)) == (step is OVERFLOW)
    with pytest.raises(anthropic.NotFoundError, match="does not serve GET") as unknown:
        await client.messages.batches.list()
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="without it, as Anthropic's"):
        await client_of(stack, key, base_url=f"{stack.url(key)}/v2").messages.create(**GOOD)
