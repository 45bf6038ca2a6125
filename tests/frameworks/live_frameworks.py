"""Agents of frameworks that have OpenTelemetry of their own, as their documentation shows them, with agl attached.

`make test-frameworks` runs each test in an environment of its own, with the newest release.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import agl_core
from agl_core.testing.fixtures import no_problems  # noqa: F401
from agl_core.testing.privacy import NO_TELEMETRY
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.server import RunningAttempt, Stack, running_stack
from agl_otel.plugin import OtelAdapter

# LiteLLM reads it when it is imported.
os.environ.update(NO_TELEMETRY)

ASKED = CallTools(
    [
        ("weather", {"city": "Bern"}, "c1"),
        ("weather", {"city": "Atlantis"}, "c2"),
        ("weather", {"city": "Nowhere"}, "c3"),
    ]
)


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    """What a worker does before it loads an agent; then the agent's one line for OpenTelemetry."""
    assert agl_core.attach([OtelAdapter()]).failed == {}
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
    yield
    agl_core.attach([]).detach()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        stack.upstream.script(ASKED, Say("Warm."))
        yield stack


async def seen(attempt: RunningAttempt) -> list[tuple[str | None, str]]:
    """The statuses by tool call, after the names of the agents are right, all ids are there, and nothing is left."""
    episode = await attempt.close()
    assert [transition.agent for transition in episode.transitions] == ["solver", "solver"]
    assert all(transition.has_ids for transition in episode.transitions)
    assert episode.unjoined == ()
    results = episode.transitions[0].tool_results
    assert [each.arguments for each in results] == [{"city": "Bern"}, {"city": "Atlantis"}, {"city": "Nowhere"}]
    assert {(each.tool, each.agent, each.adapter) for each in results} == {("weather", "solver", "otel")}
    return [(each.tool_call_id, str(each.status)) for each in results]


async def test_pydantic_ai(stack: Stack) -> None:
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    Agent.instrument_all()  # the line
    attempt = await stack.attempt()
    model = OpenAIChatModel("default", provider=OpenAIProvider(openai_client=stack.client()))
    agent = Agent(model, name="solver")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        if city == "Atlantis":
            raise ModelRetry("no such city")
        return "" if city == "Nowhere" else "22 °C"

    with attempt.running():
        await agent.run("How warm is it?")
    assert await seen(attempt) == [("c1", "ok"), ("c2", "error"), ("c3", "empty")]


async def test_strands(stack: Stack) -> None:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    @tool
    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Where.
        """
        if city == "Atlantis":
            raise ValueError("no such city")
        return "" if city == "Nowhere" else "22 °C"

    attempt = await stack.attempt()
    with attempt.running():
        model = OpenAIModel(
            client_args={"base_url": stack.url(attempt.key), "api_key": stack.key(attempt.key)}, model_id="default"
        )
        agent = Agent(name="solver", model=model, tools=[weather], callback_handler=None)
        await agent.invoke_async("How warm is it?")
    assert await seen(attempt) == [("c1", "ok"), ("c2", "error"), ("c3", "empty")]


async def test_google_adk(stack: Stack) -> None:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    def weather(city: str) -> dict[str, Any] | str:
        """Weather of a city."""
        if city == "Atlantis":
            return {"status": "error", "error_message": "no such city"}
        return "" if city == "Nowhere" else "22 °C"

    attempt = await stack.attempt()
    model = LiteLlm(model="openai/default", api_base=stack.url(attempt.key), api_key=stack.key(attempt.key))
    runner = InMemoryRunner(LlmAgent(name="solver", model=model, tools=[weather]), app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="user")
    question = types.Content(role="user", parts=[types.Part(text="How warm is it?")])
    with attempt.running():
        async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=question):
            pass
    assert await seen(attempt) == [("c1", "ok"), ("c2", "error"), ("c3", "empty")]
