"""The gateway in front of a scripted model, and DSPy's modules and tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import dspy
import pytest

import agl_core
from agl_core.testing.scripts import Say
from agl_core.testing.server import RunningAttempt, Stack, running_stack
from agl_core.types import Episode
from agl_core.worker.environment import PLACEHOLDER_KEY
from agl_dspy import plugin


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


def fields(**values: Any) -> Say:
    """What a model says in the form of DSPy's ChatAdapter."""
    parts = [
        f"[[ ## {name} ## ]]\n{value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    ]
    return Say("\n\n".join([*parts, "[[ ## completed ## ]]"]))


def acts(tool: str, **arguments: Any) -> Say:
    """One turn of a `ReAct`."""
    return fields(next_thought="Hm.", next_tool_name=tool, next_tool_args=arguments)


ANSWER = fields(reasoning="So.", answer="3")


def lm_of(stack: Stack, **options: Any) -> dspy.LM:
    """A model that any number of attempts may share: which of them calls, the headers of its requests must say."""
    return dspy.LM("openai/default", api_base=stack.url(), api_key=PLACEHOLDER_KEY, num_retries=0, **options)


async def play(stack: Stack, program: Callable[..., Any], *script: Any) -> Episode:
    """The episode of a program that is asked "1 + 2?", whose model says this."""
    stack.upstream.script(*script)
    attempt = await stack.attempt()
    await in_attempt(attempt, stack, program)
    episode = await attempt.close()
    assert episode.unjoined == ()
    return episode


async def in_attempt(attempt: RunningAttempt, stack: Stack, program: Callable[..., Any]) -> None:
    def ask() -> None:
        with dspy.context(lm=lm_of(stack)):
            program(question="1 + 2?")

    with attempt.running():
        await asyncio.to_thread(ask)


@pytest.fixture(name="stack")
async def a_stack() -> AsyncIterator[Stack]:
    attachment = agl_core.attach([plugin.dspy])
    assert attachment.failed == {}
    async with running_stack(timeout=300) as running:
        yield running
    attachment.detach()
