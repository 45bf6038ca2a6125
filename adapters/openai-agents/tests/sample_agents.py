"""Agents and tools that several tests of this adapter run."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, function_tool


def solver(*given: Any, **options: Any) -> Agent[Any]:
    return Agent(name="solver", instructions="solver", model="m", tools=list(given), **options)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def broken() -> str:
    """Fail."""
    raise ValueError("boom")


@function_tool(timeout=0.01, timeout_error_function=lambda context, error: "Later, perhaps.")
async def slow_in_own_words() -> str:
    """Take too long, in words of the user's own."""
    await asyncio.sleep(60)
    return "late"
