"""The gateway in front of a scripted upstream, and attempts to run agents in. Only fixtures import Haystack."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from testing_aids import NO_TELEMETRY

from agl_core.testing.fixtures import no_problems  # noqa: F401
from agl_core.testing.server import RunningAttempt, Stack, attached_stack
from agl_core.worker.agent import PLACEHOLDER_KEY

os.environ.update(NO_TELEMETRY)


@dataclass
class World:
    """The gateway and its upstream."""

    stack: Stack

    def generator(self, **options: Any) -> Any:
        """A model client with the server's URL alone: which attempt calls, its headers must tell."""
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        given = {"api_key": Secret.from_token(PLACEHOLDER_KEY), "api_base_url": self.stack.url(), "max_retries": 0}
        return OpenAIChatGenerator(model="default", **{**given, **options})

    async def attempt(self) -> RunningAttempt:
        return await self.stack.attempt()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    from agl_haystack import plugin

    async with attached_stack(plugin.haystack) as stack:
        yield World(stack)


@pytest.fixture
async def attempt(world: World) -> RunningAttempt:
    return await world.attempt()


@pytest.fixture
def agent(world: World) -> Callable[..., Any]:
    """Makes agents, whose system prompt is the given text."""

    def make(prompt: str, tools: Any = (), **options: Any) -> Any:
        from haystack.components.agents import Agent
        from haystack.tools import Tool, create_tool_from_function

        made = [each if isinstance(each, Tool) else create_tool_from_function(each) for each in tools]
        return Agent(chat_generator=world.generator(), system_prompt=prompt, tools=made or None, **options)

    return make


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs an agent in a pipeline that names it."""

    async def run(name: str, agent: Any) -> Any:
        from haystack import Pipeline
        from haystack.dataclasses import ChatMessage

        pipeline = Pipeline()
        pipeline.add_component(name, agent)
        return await pipeline.run_async({name: {"messages": [ChatMessage.from_user("How warm is it?")]}})

    return run
