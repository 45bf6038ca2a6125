"""Unmodified agents of frameworks without an adapter, whose tool fails: what is seen, and what the conversation tells.

`make test-frameworks` runs each test, chosen by the framework's name, in an environment of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import agl_core
from agl_core.client.agent import agent_environment, client_variables
from agl_core.learning.transitions import build_episode
from agl_core.testing.scripts import CallTools, Say
from agl_server.testing import running_stack

# Before any framework is imported, as a worker does it.
agl_core.attach()


class Seen(NamedTuple):
    agents: list[str | None]
    statuses: list[str]
    in_words: list[tuple[str, str | None]]
    """Statuses, each with its rule, where nothing but the conversation is known."""


def look_up(city: str) -> str:
    """Look the weather of a city up."""
    if city == "Bern":
        raise ValueError("no such city")
    return "The error rate of its forecasts fell."


async def play(ask: Callable[[str, str], object], tool: str = "look_up") -> Seen:
    """Two tool calls, of which the first fails; `ask` gets the base URL and the key."""
    async with running_stack() as stack:
        attempt = await stack.attempt()
        stack.upstream.script(CallTools([(tool, {"city": "Bern"}), (tool, {"city": "Thun"})]), Say("Answer: cold"))
        with attempt.running():
            await asyncio.to_thread(ask, stack.url(attempt.key), stack.key(attempt.key))
        episode = await attempt.close()
        rollout = await stack.store.rollout(attempt.key.rollout)
        [record] = await stack.store.attempts(rollout.id)
        conversation = build_episode(rollout, record, await attempt.calls())
    in_words = [(str(result.status), result.status_rule) for result in conversation.transitions[0].tool_results]
    statuses = [str(result.status) for result in episode.transitions[0].tool_results]
    return Seen([transition.agent for transition in episode.transitions], statuses, in_words)


async def test_agent_framework() -> None:
    """Microsoft's is seen without a line."""

    def ask(base_url: str, key: str) -> None:
        from agent_framework import Agent
        from agent_framework.openai import OpenAIChatCompletionClient

        client = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key=key)
        asyncio.run(Agent(client, name="solver", tools=[look_up]).run("Bern?"))

    assert await play(ask) == Seen(["solver", "solver"], ["error", "ok"], [("error", "error"), ("ok", "ok")])


async def test_agno() -> None:
    """It is seen without a line if OpenInference's instrumentor is installed; its bare texts are no errors."""

    def ask(base_url: str, key: str) -> None:
        from agno.agent import Agent
        from agno.models.openai import OpenAIChat

        model = OpenAIChat(id="m", base_url=base_url, api_key=key)
        Agent(name="solver", model=model, tools=[look_up], telemetry=False).run("Bern?")

    assert await play(ask) == Seen(["solver", "solver"], ["error", "ok"], [("ok", "ok"), ("ok", "ok")])


def test_agno_makes_anthropics_client_of_the_variables_that_agl_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    import anthropic
    from agno.models.anthropic import Claude

    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    with agent_environment(client_variables("http://127.0.0.1:9")):
        client = Claude(id="m").get_client()
    assert isinstance(client, anthropic.Anthropic)
    assert (client.api_key, client.auth_token) == ("agl", None)


async def test_camel() -> None:
    """No adapter sees its agents; its words for a failed tool are known."""

    def ask(base_url: str, key: str) -> None:
        from camel.agents import ChatAgent
        from camel.models import ModelFactory
        from camel.toolkits import FunctionTool
        from camel.types import ModelPlatformType
        from camel.utils import BaseTokenCounter

        class Counter(BaseTokenCounter):
            """Its own one is downloaded."""

            def count_tokens_from_messages(self, messages: Any) -> int:
                return 1

            def encode(self, text: str) -> list[int]:
                return [1]

            def decode(self, token_ids: list[int]) -> str:
                return ""

        platform = ModelPlatformType.OPENAI_COMPATIBLE_MODEL
        model = ModelFactory.create(platform, "m", url=base_url, api_key=key, token_counter=Counter())
        ChatAgent("You know towns.", model=model, tools=[FunctionTool(look_up)]).step("Bern?")

    assert (await play(ask)).in_words == [("error", "camel"), ("ok", "ok")]


async def test_griptape() -> None:
    """No adapter sees its agents; the text of an exception is no error, and wrong arguments are an error."""

    def ask(base_url: str, key: str) -> None:
        from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
        from griptape.structures import Agent
        from griptape.tools import BaseTool
        from griptape.utils.decorators import activity
        from schema import Schema

        class Town(BaseTool):
            @activity(config={"description": "Look a city up.", "schema": Schema({"city": str})})
            def look(self, values: dict[str, Any]) -> str:
                return look_up(values["city"])

            @activity(config={"description": "Look a town up.", "schema": Schema({"town": str})})
            def find(self, values: dict[str, Any]) -> str:
                return look_up(values["town"])

        driver = OpenAiChatPromptDriver(model="m", base_url=base_url, api_key=key)
        Agent(prompt_driver=driver, tools=[Town()]).run("Bern?")

    assert (await play(ask, "Town_look")).in_words == [("ok", "ok"), ("ok", "ok")]
    assert (await play(ask, "Town_find")).in_words == [("error", "griptape"), ("error", "griptape")]


async def test_semantic_kernel() -> None:
    """It is seen without a line; its words for a failed tool are known."""

    def ask(base_url: str, key: str) -> None:
        from openai import AsyncOpenAI
        from semantic_kernel.agents import ChatCompletionAgent
        from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
        from semantic_kernel.functions import kernel_function

        class Town:
            look_up = staticmethod(kernel_function(look_up))

        client = AsyncOpenAI(base_url=base_url, api_key=key)
        service = OpenAIChatCompletion(ai_model_id="m", async_client=client)
        agent = ChatCompletionAgent(service=service, plugins=[Town()], name="solver")
        asyncio.run(agent.get_response(messages="Bern?"))

    words = [("error", "semantic-kernel"), ("ok", "ok")]
    assert await play(ask, "Town-look_up") == Seen(["solver", "solver"], ["error", "ok"], words)
