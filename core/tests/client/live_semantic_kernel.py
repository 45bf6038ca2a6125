"""Semantic Kernel's agents are seen without a line; its words for a failed tool are known."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

from .own_words import Seen, look_up, play  # isort: skip

from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Town:
    look_up = staticmethod(kernel_function(look_up))


def ask(base_url: str, key: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key=key)
    service = OpenAIChatCompletion(ai_model_id="m", async_client=client)
    agent = ChatCompletionAgent(service=service, plugins=[Town()], name="solver")
    asyncio.run(agent.get_response(messages="Bern?"))


async def test_an_unmodified_agent() -> None:
    assert await play(ask, "Town-look_up") == Seen(
        ["solver", "solver"], ["error", "ok"], [("error", "semantic-kernel"), ("ok", "ok")]
    )
