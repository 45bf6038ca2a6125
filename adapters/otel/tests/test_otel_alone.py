"""The processor used alone: no server of agl's, any endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as OpenLLMetry
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor as GenAI
from opentelemetry.sdk.trace import TracerProvider

from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Ending, FinishReason, ToolStatus
from agl_otel import AglSpanProcessor

from .otlp_intake import ADD, USER, agent_named

AGENT = agent_named("solver")
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.result": "3"}
SAMPLING = {"temperature": 0.5, "max_tokens": 200, "seed": 3}


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as running:
        yield running


@pytest.fixture
def client(upstream: ScriptedUpstream) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=upstream.url, api_key="key", max_retries=0)


@pytest.fixture
def processor(provider: TracerProvider) -> AglSpanProcessor:
    added = AglSpanProcessor()
    provider.add_span_processor(added)
    return added


async def solve(provider: TracerProvider, client: Any, upstream: ScriptedUpstream, **options: Any) -> None:
    """An agent that asks for one tool, and answers."""
    upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    tracer, messages = provider.get_tracer("agent"), [USER]
    create = client.chat.completions.create
    with tracer.start_as_current_span("invoke_agent solver", attributes=AGENT):
        reply = await create(model="m", messages=messages, tools=[ADD], **SAMPLING, **options)
        (call,) = reply.choices[0].message.tool_calls
        with tracer.start_as_current_span("execute_tool add", attributes={**TOOL, "gen_ai.tool.call.id": call.id}):
            pass
        asks = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [asks]}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        await create(model="m", messages=messages, **SAMPLING, **options)


@pytest.mark.parametrize("kinds", [[], [OpenLLMetry], [GenAI], [OpenInference], [GenAI, OpenInference]])
async def test_an_agent_with_a_tool(
    kinds: list[Any],
    processor: AglSpanProcessor,
    provider: TracerProvider,
    instrument: Any,
    client: Any,
    upstream: ScriptedUpstream,
) -> None:
    for kind in kinds:
        instrument(kind, provider)
    await solve(provider, client, upstream)
    (episode,) = processor.episodes()
    assert (episode.ending, episode.unjoined) == (Ending.FINISHED, ())
    first, second = episode.transitions
    assert [(t.agent, t.turn, t.agent_turn) for t in (first, second)] == [("solver", 0, 0), ("solver", 1, 1)]
    (tool_call,) = first.response["tool_calls"]
    assert (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert [(o.tool, o.result, o.status) for o in first.tool_results] == [("add", "3", ToolStatus.OK)]
    assert (second.response["content"], second.finish_reason) == ("3", FinishReason.STOP)


async def test_each_root_is_an_episode_and_only_the_latest_are_kept(
    provider: TracerProvider, instrument: Any, client: Any
) -> None:
    kept = AglSpanProcessor(keep=2)
    provider.add_span_processor(kept)
    instrument(OpenLLMetry, provider)
    tracer = provider.get_tracer("agent")

    async def one(question: str) -> None:
        with tracer.start_as_current_span("run", attributes={"input.value": f'"{question}"'}):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": question}], **SAMPLING
            )

    for question in ("a", "b", "c"):
        await one(question)
    tracer.start_span("no call in it").end()
    assert [e.task.input for e in kept.episodes()] == ["b", "c"]
    await asyncio.gather(one("d"), one("e"))
    assert all(len(e.transitions) == 1 for e in kept.episodes())
    assert {e.task.input for e in kept.episodes()} == {"d", "e"}
    kept.clear()
    assert kept.episodes() == []
