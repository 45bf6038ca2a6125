"""The gateway in front of a scripted upstream, and attempts to run agents in. Only fixtures import LlamaIndex."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agl_core.testing.fixtures import no_problems  # noqa: F401
from agl_core.testing.server import RunningAttempt, Stack, attached_stack
from agl_core.worker.agent import PLACEHOLDER_KEY


@dataclass
class World:
    """The gateway and its upstream."""

    stack: Stack

    def llm(self, **options: Any) -> Any:
        """A model client with the server's URL alone: which attempt calls, its headers must tell."""
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model="default",
            api_base=self.stack.url(),
            api_key=PLACEHOLDER_KEY,
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
            **options,
        )

    async def attempt(self) -> RunningAttempt:
        return await self.stack.attempt()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    from agl_llama_index import plugin

    async with attached_stack(plugin.llama_index) as stack:
        yield World(stack)


@pytest.fixture
async def attempt(world: World) -> RunningAttempt:
    return await world.attempt()


@pytest.fixture(params=[False, True], ids=["at once", "streaming"])
def agent(request: pytest.FixtureRequest, world: World) -> Callable[..., Any]:
    """Makes `FunctionAgent`s, whose system prompt is their name."""

    def make(name: str, tools: Any = (), **options: Any) -> Any:
        from llama_index.core.agent.workflow import FunctionAgent

        about = {"name": name, "description": name, "system_prompt": name, "streaming": request.param}
        return FunctionAgent(tools=list(tools), **{"llm": world.llm(), **about, **options})

    return make
