"""Agents of the Microsoft Agent Framework are seen without a line."""

from __future__ import annotations

import asyncio

from .own_words import Seen, look_up, play  # isort: skip

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient


def ask(base_url: str, key: str) -> None:
    client = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key=key)
    asyncio.run(Agent(client, name="solver", tools=[look_up]).run("Bern?"))


async def test_an_unmodified_agent() -> None:
    assert await play(ask) == Seen(["solver", "solver"], ["error", "ok"], [("error", "error"), ("ok", "ok")])
