"""Replies of model servers that write otherwise than OpenAI: they reach every client, and what is recorded is exact."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from agl_core.apis import answered
from agl_core.apis.answered import SentMessages
from agl_core.apis.errors import ApiError
from agl_core.apis.reply import PromptIds, read_reply
from agl_core.learning.batch import left_out
from agl_core.testing import episodes
from agl_core.testing.scripts import Raw
from agl_core.types import AttemptKey, Call, DropReason, FinishReason
from agl_core.types.forms import parse_json
from agl_server.store.codec import Pieces, encode
from agl_server.testing import Stack

from .all_clients import CLIENTS, STREAMING
from .server_aids import HELLO, closed

IDS = [7, 8, 9]
ABSENT: Any = object()


def unusual(message: Mapping[str, Any], finish_reason: Any = "stop", **more: Any) -> Raw:
    """A reply as other servers write it: with fewer fields, and with these `more`."""
    logprobs = {"content": [{"token": "x", "logprob": -0.5}] * len(IDS)}
    choice = {"message": message, "finish_reason": finish_reason, "token_ids": IDS, "logprobs": logprobs}
    if finish_reason is ABSENT:
        del choice["finish_reason"]
    body = {"object": "chat.completion", "created": 1, "choices": [choice], "prompt_token_ids": [1, 2], **more}
    return Raw(json.dumps(body).encode())


async def recorded(stack: Stack, key: AttemptKey) -> Call:
    (call,) = await stack.calls(key)
    (choice,) = call.choices
    assert (call.prompt_ids.tolist(), choice.response_ids.tolist()) == ([1, 2], IDS)
    assert choice.logprobs.tolist() == [-0.5] * len(IDS)
    return call


def tool_call(**function: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


THINKING = {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}


@pytest.mark.parametrize(
    ("message", "content", "reasoning", "calls"),
    [
        (tool_call(name="add", arguments={"a": "é"}), "", "", [{"a": "é"}]),
        (tool_call(name="add", arguments=None), "", "", [{}]),
        (tool_call(name="add"), "", "", [{}]),
        (tool_call(name="add", arguments=""), "", "", [{}]),
        ({"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}] * 2}, "", "", [{}, {}]),
        ({"content": None, "refusal": "No."}, "No.", "", []),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No.", "", []),
        ({"content": None, "reasoning": "hm"}, "", "hm", []),
        ({"reasoning_content": "hm", "tool_calls": []}, "", "hm", []),
        ({"content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]}, "Hello!", "", []),
        ({"content": [THINKING, {"type": "text", "text": "Hello"}]}, "Hello", "hm", []),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, "", "hm", []),
        ({"content": []}, "", "", []),
        ({"content": "a\ud83c"}, "a\ufffd", "", []),
    ],
)
async def test_a_message_reaches_every_client(
    stack: Stack, message: dict[str, Any], content: str, reasoning: str, calls: list[Any]
) -> None:
    for ask in CLIENTS:
        key = await stack.lease()
        stack.upstream.script(unusual(message))
        assert await ask(stack, key) == (content, reasoning, calls), ask
        own = (await recorded(stack, key)).choices[0].message
        assert (own["role"], own.get("content") or own.get("refusal") or "") == ("assistant", content)
        tool_calls = own.get("tool_calls") or ()
        assert [json.loads(call["function"]["arguments"]) for call in tool_calls] == calls
        assert len({call["id"] for call in tool_calls} - {None, ""}) == len(calls), "results are joined by them"


@pytest.mark.parametrize(
    ("word", "reason", "dropped"),
    [
        ("abort", FinishReason.ABORTED, DropReason.ABORTED),
        ("error", FinishReason.ABORTED, DropReason.ABORTED),
        ("repetition", FinishReason.LENGTH, None),
        ("function_call", FinishReason.TOOL_CALLS, None),
        ("eos_token", FinishReason.STOP, None),
        ("", FinishReason.STOP, None),
        (None, FinishReason.STOP, None),
        (ABSENT, FinishReason.STOP, None),
    ],
)
async def test_whatever_a_response_ended_by(
    stack: Stack, word: Any, reason: FinishReason, dropped: DropReason | None
) -> None:
    """It reaches the agent; what the model server broke off is not trained on: the policy did not end it.

    A stream without a word for its end is one.
    """
    for ask in CLIENTS:
        if word in (None, ABSENT) and ask in STREAMING:
            reason, dropped = FinishReason.ABORTED, DropReason.ABORTED
        key = await stack.lease()
        stack.upstream.script(unusual({"content": "Hello"}, word))
        assert (await ask(stack, key))[0] == "Hello", ask
        assert (await recorded(stack, key)).choices[0].finish_reason is reason, ask
        (transition,) = (await closed(stack, key)).transitions
        assert left_out(transition, ["*"]) is dropped


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("usage", "tokens", "dropped"),
    [
        (None, 3, None),
        ({"prompt_tokens": 2, "completion_tokens": 3}, 3, None),
        ({"prompt_tokens": 2, "completion_tokens": 4}, 4, DropReason.INCOMPLETE_IDS),
    ],
)
async def test_usage_and_ids_are_compared(
    stack: Stack, usage: Any, tokens: int, dropped: DropReason | None, stream: bool
) -> None:
    key = await stack.lease()
    stack.upstream.script(unusual({"content": "Hello"}, usage=usage))
    more: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: Any = await stack.client(key).chat.completions.create(model="m", messages=HELLO, **more)
    shown = [chunk async for chunk in answer][-1].usage if stream else answer.usage
    assert (shown.prompt_tokens, shown.completion_tokens) == (2, tokens)
    await recorded(stack, key)
    (transition,) = (await closed(stack, key)).transitions
    assert left_out(transition, ["*"]) is dropped


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
async def test_no_tools_are_offered_in_one_way(stack: Stack, client: AsyncOpenAI, choice: Any) -> None:
    for tools in ({}, {"tools": []}):
        await client.chat.completions.create(model="m", messages=HELLO, **tools, **(choice if tools else {}))
    bare, empty = ({k: v for k, v in received.body.items() if k != "seed"} for received in stack.upstream.received)
    assert empty == bare
    for ask in (
        client.responses.create(model="m", input="hello", tools=[], **choice),
        client.chat.completions.create(model="m", messages=HELLO, **choice),
    ):
        await ask
        assert not {"tools", "tool_choice"} & stack.upstream.received[-1].body.keys()


def test_prompt_ids_are_read_alike_whatever_reply_came_before() -> None:
    def ids_of(prompt: str, earlier: PromptIds | None) -> list[int] | str | None:
        field = {'a"prompt_token_ids': [9], "object": "x" * (1 if earlier is None else 20_000)} | (
            {"prompt_token_ids": "HERE"} if prompt else {}
        )
        body = {**field, "choices": [{"message": {"content": '"prompt_token_ids": [5]', "prompt_token_ids": [6]}}]}
        try:
            read = read_reply(
                json.dumps(body).replace('"HERE"', prompt).encode(), {}, "x", logprobs=False, earlier=earlier
            )
        except ApiError as error:
            return error.code
        return None if read.prompt_ids is None else read.prompt_ids.tolist()

    prompts = [
        "", "[1, 2]", "[1, 2, 3]", "[1, 23]",
        "[1,2]", "[]", "[1, 2, ]", '[1, 2, "3"]', "[1, 2, 3.5]", "[1, 2 3]", "null"
    ]  # fmt: skip
    for before, after in itertools.product(prompts, prompts):
        memory = PromptIds()
        assert [ids_of(text, memory) for text in (before, after)] == [ids_of(text, None) for text in (before, after)]


@given(st.data())
def test_a_request_is_read_alike_whatever_request_came_before(data: st.DataObject) -> None:
    values = st.recursive(
        st.sampled_from([1, -1, None, 'a,]}[{"', "x\\", "é😀"]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["messages", "a"]), inner),
        max_leaves=4,
    )
    sent, messages, before = SentMessages(), [], data.draw(st.dictionaries(st.sampled_from("ab"), values))
    for _ in range(4):
        messages = data.draw(st.sampled_from([messages, []])) + data.draw(st.lists(values, max_size=3))
        body = {**before, "messages": [f"{answered._SHORT * 'x'}", *messages], "after": data.draw(values)}
        text = json.dumps(body, indent=data.draw(st.sampled_from([None, 1])))
        text = data.draw(st.sampled_from([text, text[:-1], f'{text[:-1]}, "messages": {json.dumps(messages)}}}']))
        results = list[Any]()
        for parse in (sent.parse, parse_json):
            try:
                results.append(parse(text.encode()))
            except ValueError:
                results.append(None)
        assert repr(results[0]) == repr(results[1])


def test_a_turn_costs_what_it_adds() -> None:
    def cost(n_before: int) -> float:
        """Seconds to read and encode one of the turns that follow so many, the fastest."""
        messages, ids, memory, pieces, seconds = HELLO, [7], PromptIds(), Pieces(1), list[float]()
        conversation = SentMessages()
        for turn in range(n_before + 15):
            messages, ids = [*messages, {"role": "user", "content": f"{turn} {'word ' * 99}"}], [*ids, *range(100)]
            body = json.dumps({"choices": [{"message": {"content": "x"}}], "prompt_token_ids": ids}).encode()
            sent = json.dumps({"messages": messages}).encode()
            started = time.process_time()
            conversation.parse(sent)
            reply = read_reply(body, {}, "x", logprobs=False, earlier=memory)
            encode([episodes.call(request={"messages": messages}, prompt_ids=reply.prompt_ids)], pieces)
            seconds.append(time.process_time() - started)
            assert reply.prompt_ids is not None
            assert np.array_equal(reply.prompt_ids, ids)
        return min(seconds[n_before:])

    assert cost(160) < 8 * cost(0)
