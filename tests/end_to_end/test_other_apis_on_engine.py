"""The Responses and Messages APIs on the whole stack: every echo of a reply keeps the very tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import agents
import anthropic
import openai
import pytest

from agl_core.types import AttemptKey

from .engine_stack import EngineStack, engine_stack

PARAMETERS: Any = {"type": "object", "properties": {}}
ASKED: dict[str, Any] = {"model": "default"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    with engine_stack(tmp_path_factory.mktemp("engine-stack")) as running:
        yield running


def prefixes_are_exact(stack: EngineStack, key: AttemptKey, turns: int) -> None:
    """Every prompt begins with the prompt and the response before it."""
    calls = stack.calls(key)
    assert len(calls) == turns
    assert any(call.choices[0].message.get("tool_calls") for call in calls)
    for before, after in pairwise(calls):
        assert before.prompt_ids is not None
        assert after.prompt_ids is not None
        assert before.choices[0].response_ids is not None
        so_far = [*before.prompt_ids.tolist(), *before.choices[0].response_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(so_far)] == so_far
        assert not after.prefix_broken


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_responses(stack: EngineStack, streamed: bool, continued: bool) -> None:
    key = stack.lease()
    client = stack.client(key)
    tools: Any = [{"type": "function", "name": "magic_function", "parameters": PARAMETERS}]
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    previous: dict[str, Any] = {}
    for turn in range(6):
        choice: Any = {"tool_choice": "required"} if turn % 2 else {}
        asked = {**ASKED, **previous, **choice, "input": items, "instructions": "Be kind.", "tools": tools}
        if streamed:
            with client.responses.stream(**asked) as stream:
                events = list(stream)
            response: Any = next(e.response for e in reversed(events) if hasattr(e, "response"))
        else:
            response = client.responses.create(**asked)
        new = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "22 °C"}
            for item in response.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": f"and {turn}?"}]
        items = new if continued else [*items, *response.output, *new]
        previous = {"previous_response_id": response.id} if continued else {}
    prefixes_are_exact(stack, key, 6)


@pytest.mark.parametrize("streamed", [False, True])
def test_messages(stack: EngineStack, streamed: bool) -> None:
    key = stack.lease()
    base_url = stack.url(key).removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key=stack.server.keys.of_attempt(key), max_retries=0)
    tools: Any = [{"name": "magic_function", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    for turn in range(6):
        choice: Any = {"tool_choice": {"type": "any"}} if turn % 2 else {}
        asked = {**ASKED, **choice, "max_tokens": 32, "system": "Be kind.", "messages": messages, "tools": tools}
        if streamed:
            with client.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        new: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "22 °C"}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": new or f"{turn}?"}]
    prefixes_are_exact(stack, key, 6)


def test_messages_tell_the_stop_sequence(stack: EngineStack) -> None:
    key = stack.lease()
    base_url = stack.url(key).removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key=stack.server.keys.of_attempt(key), max_retries=0)
    asked: dict[str, Any] = {**ASKED, "max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}]}
    text = "".join(block.text for block in client.messages.create(**asked).content if block.type == "text")
    stops = ["e", "a", " ", "0"]
    assert set(stops) & set(text), "the model's random words have none of these: use others"
    # Each reply is another: one may end before it has any of these.
    replies = (client.messages.create(**asked, stop_sequences=stops) for _ in range(20))
    message = next(reply for reply in replies if reply.stop_reason != "end_turn")
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence in stops
    assert not set(stops) & set("".join(block.text for block in message.content if block.type == "text"))


@agents.function_tool
def magic_function() -> str:
    """The weather."""
    return "22 °C"


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_an_agent_with_the_settings_that_its_sdk_has_by_default(stack: EngineStack, api: str) -> None:
    """The Agents SDK asks for the effort and verbosity of the vendor's own models, whatever the model."""
    key = stack.lease()
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]
    agent = agents.Agent(name="helper", instructions="Be kind.", tools=[magic_function])

    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url=stack.url(key), api_key=stack.server.keys.of_attempt(key), max_retries=0
        ) as client:
            agent.model = kind("default", client)
            return await agents.Runner.run(agent, "Hello", run_config=agents.RunConfig(tracing_disabled=True))

    assert asyncio.run(run()).final_output
    (call,) = stack.calls(key)
    assert {"reasoning_effort", "verbosity"} <= call.request.keys()
    assert call.prompt_ids is not None
