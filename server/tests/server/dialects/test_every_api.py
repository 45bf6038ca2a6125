"""Every API: calls are recorded and forwarded exactly, and answered as the types of the official SDKs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.learning.transitions import grammar_of
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import AttemptKey, Call, FinishReason, Mode
from agl_server.testing import Stack

from ..server_aids import HELLO, OWN, chunks_of, events_of, extras, post, reply

BRIEF = {"role": "system", "content": "Be brief."}
GATEWAYS = {"model", "messages", "temperature", "top_p", "seed", "return_token_ids", "logprobs"}
"""Fields of every forwarded request."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add.", "parameters": SCHEMA}
CHAT_ADD = {"type": "function", "function": ADD}
MESSAGES_ADD = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
CHOICE = {"type": "function", "function": {"name": "add"}}
UNCHANGED = {"stop": "END", "user": "me", "presence_penalty": 0.5, "max_tokens": 77}
CHAT_ONLY = {"tools": [CHAT_ADD], "tool_choice": "none", "response_format": {"type": "json_object"}, "stop": ["END"]}
"""Fields that the upstream gets as they are."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


class Api(NamedTuple):
    request: dict[str, Any]
    """`[BRIEF, *HELLO]` in this API."""
    id_prefix: str
    whole: type[BaseModel]
    event: Callable[[Any], Any]
    """Parses one event of a stream."""
    nothing: dict[str, Any]
    """Fields that ask for nothing."""
    translated: list[tuple[dict[str, Any], dict[str, Any]]]
    """Fields of requests, and what they are in the forwarded one."""


def nulls(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names)


APIS = {
    "chat.completions": Api(
        {"messages": [BRIEF, *HELLO]},
        "chatcmpl-",
        ChatCompletion,
        TypeAdapter(ChatCompletionChunk).validate_python,
        nulls("tools", "stop", "n", "logprobs", "top_p"),
        [(UNCHANGED | CHAT_ONLY, UNCHANGED | CHAT_ONLY)],
    ),
    "completions": Api(
        {"prompt": ["hello"]},
        "cmpl-",
        Completion,
        lambda data: Completion.construct(**data),  # Its model has no place for a reason that is not known yet.
        {"echo": False, "suffix": "", "best_of": 1, **nulls("stop", "logprobs")},
        [(UNCHANGED, UNCHANGED)],
    ),
    "responses": Api(
        {"input": "hello", "instructions": "Be brief."},
        "resp_",
        Response,
        TypeAdapter(ResponseStreamEvent).validate_python,
        {"background": False, "truncation": "disabled", "include": [], "text": {"format": {"type": "text"}}}
        | {"reasoning": {"effort": None, "summary": None}, "tools": []}
        | nulls("previous_response_id", "tool_choice", "prompt"),
        [
            (
                {
                    "tools": [{"type": "function", **ADD}],
                    "tool_choice": {"type": "function", "name": "add"},
                    "parallel_tool_calls": False,
                    "max_output_tokens": 77,
                    "reasoning": {"effort": "low", "summary": "auto"},
                    "include": ["reasoning.encrypted_content"],
                    "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}, "verbosity": "low"},
                    "user": "me",
                    "store": False,
                },
                {
                    "tools": [CHAT_ADD],
                    "tool_choice": CHOICE,
                    "parallel_tool_calls": False,
                    "max_tokens": 77,
                    "reasoning_effort": "low",
                    "response_format": FORMAT,
                    "verbosity": "low",
                    "user": "me",
                },
            )
        ],
    ),
    "messages": Api(
        {"messages": HELLO, "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
        | {"max_tokens": 77},
        "msg_",
        Message,
        TypeAdapter(RawMessageStreamEvent).validate_python,
        nulls("tools", "tool_choice", "output_config", "container", "thread", "stop", "n", "top_p"),
        [
            (
                {
                    "tools": [{**MESSAGES_ADD, "type": "custom", "cache_control": {"type": "ephemeral"}}],
                    "stop_sequences": ["END"],
                    "thinking": {"type": "disabled"},
                    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
                },
                {
                    "tools": [CHAT_ADD],
                    "max_tokens": 77,
                    "stop": ["END"],
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
                    },
                    "reasoning_effort": "low",
                },
            ),
            (
                {"tools": [MESSAGES_ADD], "tool_choice": {"type": "auto"}},
                {"tools": [CHAT_ADD], "max_tokens": 77, "tool_choice": "auto"},
            ),
            (
                {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
                {"max_tokens": 77, "tool_choice": "required", "parallel_tool_calls": False},
            ),
            ({"tool_choice": {"type": "tool", "name": "add"}}, {"max_tokens": 77, "tool_choice": CHOICE}),
            (
                {"tools": [MESSAGES_ADD], "tool_choice": {"type": "none"}},
                {"tools": [CHAT_ADD], "max_tokens": 77, "tool_choice": "none"},
            ),
        ],
    ),
}
every_api = pytest.mark.parametrize("name", APIS)


async def ask(stack: Stack, key: Any, name: str, *changes: dict[str, Any]) -> list[Any]:
    """Send the API's request with each of these changes."""
    bodies = [{"model": "default", **APIS[name].request, **change} for change in changes]
    replies = [await post(stack, key, body, name.replace(".", "/")) for body in bodies]
    assert [reply.status_code for reply in replies] == [200] * len(bodies), [reply.text for reply in replies]
    return replies


@every_api
async def test_a_call_is_recorded_exactly_as_sampled(stack: Stack, key: AttemptKey, name: str) -> None:
    stack.upstream.script(reply(OWN["text"]))
    (answer,) = await ask(stack, key, name, {"metadata": {"a": "b"}})
    (call,) = await stack.calls(key)
    (choice,) = call.choices
    sampled = [*OWN["text"]["content"].encode(), END_TOKEN]
    messages = HELLO if name == "completions" else [BRIEF, *HELLO]
    limit = {"max_tokens": 77} if name == "messages" else {}
    assert (call.id, call.sequence, call.policy, call.api, call.version) == (answer.json()["id"], 0, "default", name, 3)
    assert call.id.startswith(APIS[name].id_prefix)
    assert answer.json()["model"] == "default"
    assert call.request == {"model": "default", "metadata": {"a": "b"}, "messages": messages, **limit}
    assert call.prompt_ids.tolist() == [1, 2, 3]
    assert choice.response_ids.tolist() == sampled
    assert choice.logprobs.tolist() == np.float32([logprob(token) for token in sampled]).tolist()
    assert (choice.finish_reason, choice.message["content"]) == (FinishReason.STOP, OWN["text"]["content"])
    assert (call.prefilled, call.reused, call.prefix_broken) == (1, 2, "edited"), "as the engine tells"
    assert (choice.mask.tolist(), choice.parse_error) == ([False, *[True] * (len(sampled) - 1)], "no closing brace")
    assert call.started <= call.ended

    (received,) = stack.upstream.received
    assert received.body["messages"] == messages
    assert (received.body["model"], received.headers["Authorization"]) == ("served", "Bearer upstream-key")
    assert received.headers[HEADER_ROLLOUT] == f"{key.rollout}/{key.attempt}"
    assert received.body.keys() == GATEWAYS | {"max_tokens", "metadata"}


@every_api
async def test_what_is_asked_is_translated(stack: Stack, name: str) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    sampling = {"temperature": 0.3, "top_p": 0.9, "seed": 5}
    for fields, forwarded in APIS[name].translated:
        await ask(stack, key, name, {**fields, **sampling, "invented": {"x": 1}, "top_k": 5})
        body = stack.upstream.received[-1].body
        assert {k: v for k, v in body.items() if k not in GATEWAYS} == {**forwarded, "invented": {"x": 1}, "top_k": 5}
        call = (await stack.calls(key))[-1]
        assert call.request.get("tools") == forwarded.get("tools")
        assert grammar_of(call.request) == grammar_of(forwarded), "training reads the form of a reply there"
        requested = call.requested
        assert (requested.temperature, requested.top_p, requested.seed, requested.max_tokens) == (0.3, 0.9, 5, 77)
    await ask(stack, await stack.lease(), name, {"top_k": 5})
    assert "top_k" not in stack.upstream.received[-1].body, "it would distort what is trained on"


@every_api
async def test_null_and_what_asks_for_nothing_is_absent(stack: Stack, name: str) -> None:
    (answer,) = await ask(stack, await stack.lease(), name, APIS[name].nothing)
    APIS[name].whole.model_validate_json(answer.text)
    assert stack.upstream.received[0].body.keys() == GATEWAYS | {"max_tokens"}


@every_api
async def test_replies_and_streams_fit_the_schema_have_no_extras_and_are_recorded_alike(
    stack: Stack, key: AttemptKey, name: str
) -> None:
    api = APIS[name]
    for case, own in OWN.items():
        stack.upstream.script(*[reply(own, stop_reason="END" if own is OWN["text"] else None)] * 2)
        whole, streamed = await ask(stack, key, name, {}, {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = chunks_of(streamed.text) if name.endswith("completions") else events_of(streamed.text)
        parsed = [api.event(event) for event in events if event.get("type") != "ping"]
        message = api.whole.model_validate_json(whole.text)
        names = [path.rpartition(".")[2] for model in (message, *parsed) for path in extras(model)]
        assert not set(names) - {"reasoning", "reasoning_content"}, case
        CHECKS[name](message.model_dump(), events, own)
        assert stack.upstream.received[-1].body["stream"] is True
        check_records(*(await stack.calls(key))[-2:])


def check_records(whole: Call, added_up: Call) -> None:
    for field in ("version", "prefilled", "reused", "prefix_broken", "api", "undelivered"):
        assert getattr(added_up, field) == getattr(whole, field)
    assert added_up.prompt_ids.tolist() == whole.prompt_ids.tolist()
    for ours, theirs in zip(added_up.choices, whole.choices, strict=True):
        assert (ours.finish_reason, ours.parse_error) == (theirs.finish_reason, theirs.parse_error)
        said, expected = ({k: v for k, v in c.message.items() if v not in (None, "", [])} for c in (ours, theirs))
        assert said == expected
        for mine, other in ((ours.response_ids, theirs.response_ids), (ours.logprobs, theirs.logprobs)):
            assert mine.tolist() == other.tolist()


def check_chat(whole: Any, chunks: Any, own: Any) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert whole["choices"][0]["logprobs"] is None
    assert deltas[0]["role"] == "assistant"
    assert {chunk["id"] for chunk in chunks} != {whole["id"]}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(delta.get("content") or "" for delta in deltas) == (own["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    for index, call in enumerate(own.get("tool_calls") or ()):
        opened, *written = (part for part in calls if part["index"] == index)
        assert (opened["id"], opened["function"]["name"]) == (call["id"], call["function"]["name"])
        arguments = "".join(part["function"]["arguments"] for part in (opened, *written))
        assert arguments == call["function"]["arguments"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]


def check_completions(whole: Any, chunks: Any, own: Any) -> None:
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"] == (own["content"] or "")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def check_responses(whole: Any, events: Any, own: Any) -> None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    reasoning, calls = own.get("reasoning") or own.get("reasoning_content"), own.get("tool_calls")
    written = {"reasoning_text": reasoning, "output_text": own["content"], "function_call_arguments": calls}
    assert {event["type"] for event in events if "delta" in event["type"]} == {
        f"response.{kind}.delta" for kind, text in written.items() if text
    }
    last = Response.model_validate(events[-1]["response"]).model_dump()
    assert last["id"] != whole["id"]
    assert [{**item, "id": ""} for item in last["output"]] == [{**item, "id": ""} for item in whole["output"]]


def check_messages(whole: Any, events: Any, own: Any) -> None:
    kinds = [event["type"] for event in events if event["type"] not in ("content_block_delta", "ping")]
    blocks = ["content_block_start", "content_block_stop"] * len(whole["content"])
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (20, 10)


CHECKS = {
    "chat.completions": check_chat,
    "completions": check_completions,
    "responses": check_responses,
    "messages": check_messages,
}
