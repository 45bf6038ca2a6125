"""Haystack's own: its pipelines and its tracing."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from running_servers import leased_attempt, stack_fixture  # noqa: F401
from testing_aids import NO_TELEMETRY, check_snippets, weather

os.environ.update(NO_TELEMETRY)

from haystack import Pipeline, tracing
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.tracing.tracer import NullTracer, Span, Tracer
from haystack.utils import Secret

from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_haystack import haystack as adapter
from agl_server.testing import LeasedAttempt, Stack, no_problems  # noqa: F401

README = Path(__file__).parent.parent / "README.md"


a_stack = stack_fixture(adapter)


def generator(stack: Stack) -> OpenAIChatGenerator:
    """A model client with the server's URL alone: which attempt calls, its headers must tell."""
    key = Secret.from_token(PLACEHOLDER_KEY)
    return OpenAIChatGenerator(api_key=key, model="default", api_base_url=stack.url(), max_retries=0)


async def solve(stack: Stack) -> None:
    """An agent with a tool, in a pipeline that names it."""
    pipeline = Pipeline()
    tools = [create_tool_from_function(weather)]
    pipeline.add_component("solver", Agent(chat_generator=generator(stack), system_prompt="solver", tools=tools))
    await pipeline.run_async({"solver": {"messages": [ChatMessage.from_user("How warm is it?")]}})


async def test_a_tool_that_does_not_exist(stack: Stack, attempt: LeasedAttempt) -> None:
    stack.upstream.script(CallTools([("climate", {}, "c1")]), Say("Sorry."))
    with attempt.running():
        await solve(stack)
    (result,) = (await attempt.close()).transitions[0].tool_results
    assert (result.tool, str(result.status), result.tool_call_id) == ("climate", "error", "c1")
    assert "Tool 'climate' not found. Available tools: weather" in result.error


async def test_components_of_a_pipeline_are_known_by_their_names(stack: Stack, attempt: LeasedAttempt) -> None:
    pipeline = Pipeline()
    pipeline.add_component("writer", generator(stack))
    pipeline.add_component("critic", generator(stack))
    pipeline.connect("writer.replies", "critic.messages")
    stack.upstream.answer = lambda _: Say("Well.")
    with attempt.running():
        await asyncio.to_thread(pipeline.run, {"writer": {"messages": [ChatMessage.from_user("Write.")]}})
    assert await attempt.agents() == ["writer", "critic"]


async def test_a_tracer_of_the_users_own_stays(stack: Stack, attempt: LeasedAttempt) -> None:
    class Noting(NullTracer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def trace(self, operation_name: str, tags: Any = None, parent_span: Span | None = None) -> Any:
            self.seen.append(operation_name)
            return super().trace(operation_name, tags, parent_span)

    noting: Tracer = Noting()
    stack.upstream.script(Say("Warm."))
    tracing.enable_tracing(noting)
    try:
        with attempt.running():
            await solve(stack)
    finally:
        tracing.disable_tracing()
    assert {"haystack.pipeline.run", "haystack.component.run", "haystack.agent.run"} <= set(noting.seen)
    assert await attempt.agents() == ["solver"]


async def test_the_snippets(stack: Stack, attempt: LeasedAttempt) -> None:
    await check_snippets(stack, attempt, README, ["solver", "solver"])
