"""The gateway in front of a scripted model, and agents with a few tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from smolagents import LogLevel, OpenAIServerModel, tool

from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.server import RunningAttempt, Stack, attached_stack
from agl_core.types import Episode
from agl_core.worker.environment import PLACEHOLDER_KEY
from agl_smolagents import plugin


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


@tool
def broken(reason: str) -> str:
    """Fail.

    Args:
        reason: Why.
    """
    raise ValueError(reason)


def code(text: str) -> Say:
    """What a model says that writes this code."""
    return Say(f"Thought: I write code.\n```py\n{text}\n```")


def calls(*asked: tuple[Any, ...]) -> CallTools:
    return CallTools(asked)


ANSWER = calls(("final_answer", {"answer": "done"}))


def made(kind: Callable[..., Any], model: Any, **options: Any) -> Any:
    """An agent that prints nothing."""
    return kind(**{"tools": [add, broken], "model": model, "verbosity_level": LogLevel.OFF, **options})


def model_of(stack: Stack) -> OpenAIServerModel:
    """A model that any number of attempts may share: which of them calls, the headers of its requests must say."""
    return OpenAIServerModel("default", stack.url(), PLACEHOLDER_KEY, client_kwargs={"max_retries": 0})


async def play(stack: Stack, agent: Any, *script: Any, run: Callable[[Any], Any] | None = None) -> Episode:
    """The episode of an agent whose model says this."""
    stack.upstream.script(*script)
    attempt = await stack.attempt()
    await in_attempt(attempt, agent, run)
    episode = await attempt.close()
    assert episode.unjoined == ()
    return episode


async def in_attempt(attempt: RunningAttempt, agent: Any, run: Callable[[Any], Any] | None = None) -> None:
    with attempt.running():
        await asyncio.to_thread(run or (lambda agent: agent.run("hello")), agent)


@pytest.fixture(name="stack")
async def a_stack() -> AsyncIterator[Stack]:
    async with attached_stack(plugin.smolagents, timeout=300) as running:
        yield running
