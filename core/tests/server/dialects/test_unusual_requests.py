"""What common agents ask for beside text and functions: hosted and custom tools, summaries of reasoning, images."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from agl_core.testing.scripts import Fail, Raw, Say
from agl_core.testing.server import Stack
from agl_core.types import AttemptKey, Ending, Episode
from agl_core.wire.workers import CloseRequest

HOSTED: Any = {"type": "web_search", "search_context_size": "low"}
SHELL: dict[str, Any] = {"name": "shell", "description": "Runs a command."}
GRAMMAR = {"definition": "start: /.+/", "syntax": "lark"}
ASKED: dict[str, Any] = {"model": "default", "input": "hello"}
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
CALLED = {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
REPLY = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "served",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        }
    ],
}
USES_CUSTOM = Raw(json.dumps(REPLY).encode())


async def test_a_summary_of_reasoning_is_not_required(stack: Stack) -> None:
    key = await stack.lease()
    response = await stack.client(key).responses.create(
        **ASKED, reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"], store=False
    )
    assert response.output_text
    (received,) = stack.upstream.received
    assert received.body["reasoning_effort"] == "low"
    assert not {"reasoning", "include", "store"} & set(received.body)


async def test_hosted_tools_are_passed_on_and_named_only_where_they_are_refused(stack: Stack) -> None:
    key = await stack.lease()
    client = stack.client(key)
    stack.upstream.script(Say("found"), Fail(400, {"error": {"message": "no such tool."}}))
    response = await client.responses.create(**ASKED, tools=[HOSTED], tool_choice={"type": "web_search_preview"})
    assert response.output_text == "found"
    assert stack.upstream.received[0].body["tools"] == [HOSTED]
    assert stack.upstream.received[0].body["tool_choice"] == {"type": "web_search_preview"}
    with pytest.raises(openai.BadRequestError, match=r"no such tool\. .*tools\[0\] is of type 'web_search'"):
        await client.responses.create(**ASKED, tools=[HOSTED])


async def test_a_refusal_that_has_another_cause_stays_as_it_is(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Fail(429, {"error": {"message": "slow down"}}), Fail(400, {"error": {"message": "no"}}))
    with pytest.raises(openai.RateLimitError) as busy:
        await stack.client(key).responses.create(**ASKED, tools=[HOSTED])
    with pytest.raises(openai.BadRequestError) as plain:
        await stack.client(key).responses.create(**ASKED)
    assert "web_search" not in str(busy.value)
    assert "may not take" not in str(plain.value)


async def test_images_are_named_where_they_are_refused(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(Fail(400, {"error": {"message": "not a multimodal model"}}))
    parts: Any = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:image/png,x"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[1\] is of type 'image_url'"):
        await stack.client(key).chat.completions.create(model="default", messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_chat_completions(stack: Stack, stream: bool) -> None:
    key = await stack.lease()
    client = stack.client(key)
    tools: Any = [{"type": "custom", "custom": SHELL}]
    stack.upstream.script(USES_CUSTOM)
    asked: Any = {**CHAT, "tools": tools, "stream": stream}
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        parts: list[Any] = [(each.model_extra or {})["custom"] for each in deltas]
        assert (parts[0]["name"], "".join(part["input"] for part in parts)) == ("shell", "ls -l")
    else:
        made: Any = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
        assert (made[0].type, made[0].custom.name, made[0].custom.input) == ("custom", "shell", "ls -l")
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "total 0"}
    again: Any = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALLED]}, answer]
    await client.chat.completions.create(model="default", messages=again, tools=tools)
    assert stack.upstream.received[0].body["tools"] == tools
    episode = await _closed(stack, key)
    (result,) = episode.transitions[0].tool_results
    assert (result.tool, result.arguments, result.result) == ("shell", "ls -l", "total 0")


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_the_responses_api(stack: Stack, stream: bool) -> None:
    key = await stack.lease()
    client = stack.client(key)
    tools: Any = [{"type": "custom", **SHELL, "format": {"type": "grammar", **GRAMMAR}}]
    stack.upstream.script(USES_CUSTOM)
    asked: Any = {**ASKED, "tools": tools, "tool_choice": {"type": "custom", "name": "shell"}}
    if stream:
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        response = events[-1].response
        assert "".join(each.delta for each in events if each.type == "response.custom_tool_call_input.delta") == "ls -l"
    else:
        response = await client.responses.create(**asked)
    item: Any = response.output[0]
    assert (item.type, item.call_id, item.name, item.input) == ("custom_tool_call", "call_1", "shell", "ls -l")
    first = stack.upstream.received[0].body
    assert first["tools"] == [
        {"type": "custom", "custom": {**SHELL, "format": {"type": "grammar", "grammar": GRAMMAR}}}
    ]
    assert first["tool_choice"] == {"type": "custom", "custom": {"name": "shell"}}
    output: Any = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "total 0"}
    await client.responses.create(
        model="default", input=[{"role": "user", "content": "hello"}, item.model_dump(), output], tools=tools
    )
    assert stack.upstream.received[1].body["messages"][1]["tool_calls"] == [CALLED]
    episode = await _closed(stack, key)
    assert [each.tool for each in episode.transitions[0].tool_results] == ["shell"]


async def _closed(stack: Stack, key: AttemptKey) -> Episode:

    await stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))
    return await stack.episode(key)
