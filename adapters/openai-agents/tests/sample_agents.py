"""Agents and tools that several tests of this adapter run."""

from __future__ import annotations

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
