"""Conversations in the Messages API: what is echoed, what tools gave, and what is learned from it."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.learning import build_episode
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools
from agl_core.testing.server import Stack
from agl_core.types import Attempt, AttemptKey, Ending, Episode, ToolStatus

from ..api_oracles import HELLO, OWN, client_of, reply

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 100}


def forwarded(stack: Stack) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = stack.upstream.received[-1].body["messages"]
    return messages


async def episode(stack: Stack, key: AttemptKey) -> Episode:
    attempt = Attempt(key.rollout, key.attempt, "w", 0.0, ending=Ending.FINISHED)
    return build_episode(make.rollout(key.rollout), attempt, await stack.calls(key))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
async def test_an_echo_is_the_upstreams_own_message(stack: Stack, streamed: bool, as_json: bool) -> None:
    for name, own in OWN.items():
        key = await stack.lease()
        client = client_of(stack, key)
        stack.upstream.script(reply(own))
        if streamed:
            async with client.messages.stream(**ASKED, messages=HELLO) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**ASKED, messages=HELLO)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
            for block in message.content
            if block.type == "tool_use"
        ]
        content = message.to_dict()["content"] if as_json else message.content
        asks: Any = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": results or "go"}]
        await client.messages.create(**ASKED, messages=asks)
        told = [{"role": "tool", "tool_call_id": each["tool_use_id"], "content": "done"} for each in results]
        wanted = [*HELLO, own, *(told or [{"role": "user", "content": "go"}])]
        assert forwarded(stack) == wanted, name
        assert (await stack.calls(key))[-1].request["messages"] == wanted, name


async def test_numbers_that_another_language_writes_otherwise(stack: Stack) -> None:
    """JavaScript makes 1 of 1.0 and sorts nothing; the reply is recognised all the same."""
    own = OWN["spacing, order, escapes, floats"]
    client = client_of(stack, await stack.lease())
    stack.upstream.script(reply(own))
    await client.messages.create(**ASKED, messages=HELLO)
    block = {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": {}, "a": [100, "é", None, True], "z": 1}}
    echo: Any = [*HELLO, {"role": "assistant", "content": [block]}, *HELLO]
    await client.messages.create(**ASKED, messages=echo)
    assert forwarded(stack)[1] == own
    block["input"] = {"z": 2}
    await client.messages.create(**ASKED, messages=echo)
    assert forwarded(stack)[1]["tool_calls"][0]["function"]["arguments"] == '{"z": 2}'


async def test_what_tools_gave_is_an_tool_result(stack: Stack) -> None:
    key = await stack.lease()
    client = client_of(stack, key)
    stack.upstream.script(CallTools([("add", {"n": each}) for each in range(6)]))
    message = await client.messages.create(**ASKED, messages=HELLO)
    said: list[dict[str, Any]] = [
        {"content": "no such city", "is_error": True},
        {"content": [{"type": "text", "text": "it timed"}, {"type": "text", "text": " out"}], "is_error": True},
        {"content": "ValueError: what the file says", "is_error": False},
        {"content": "ValueError: raised"},
        {},
        {"content": "22 °C"},
    ]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, **each}
        for block, each in zip(message.content, said, strict=True)
    ]
    answer: Any = {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]}
    await client.messages.create(**ASKED, messages=[*HELLO, {"role": "assistant", "content": message.content}, answer])
    first, second = (await episode(stack, key)).transitions
    assert [each.status for each in first.tool_results] == [
        ToolStatus.ERROR,
        ToolStatus.TIMEOUT,
        ToolStatus.OK,
        ToolStatus.ERROR,
        ToolStatus.EMPTY,
        ToolStatus.OK,
    ]
    assert (first.tool_results[0].tool, first.tool_results[0].error) == ("add", "no such city")
    assert [each["role"] for each in second.messages] == ["user", "assistant", *["tool"] * 6, "user"]
    assert second.messages[2]["status"] == "error"
    assert [set(each) for each in forwarded(stack)[2:8]] == [{"role", "tool_call_id", "content"}] * 6
    assert forwarded(stack)[-1] == {"role": "user", "content": "and now?"}
