"""The gateway in front of a scripted model, and crews of a few tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from crewai import LLM, Agent, Crew, Task
from crewai.tools import BaseTool, tool

from agl_core.testing.scripts import CallTools
from agl_core.testing.server import Stack, attached_stack
from agl_core.types import Episode
from agl_core.worker.environment import PLACEHOLDER_KEY
from agl_crewai import plugin


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("broken")
def broken(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@tool("slow")
def slow() -> str:
    """Take too long."""
    raise TimeoutError("no answer in 5 seconds")


def calls(*asked: tuple[Any, ...]) -> CallTools:
    return CallTools(asked)


def llm_of(root: str, key: str = PLACEHOLDER_KEY, **options: Any) -> LLM:
    """A model that any number of attempts may share: which of them calls, the headers of its requests must say."""
    return LLM("default", provider="openai", base_url=root, api_key=key, **{"max_retries": 0, **options})


def agent_of(llm: Any, role: str, tools: tuple[BaseTool, ...] = (), **options: Any) -> Agent:
    return Agent(role=role, goal="Answer.", backstory="You know it.", llm=llm, tools=list(tools), **options)


def task_of(agent: Agent | None, text: str = "Answer it.", **options: Any) -> Task:
    return Task(description=text, expected_output="An answer.", agent=agent, **options)


def crew_of(*tasks: Task, **options: Any) -> Crew:
    agents = [each.agent for each in tasks if each.agent is not None]
    return Crew(**{"agents": agents, "tasks": list(tasks), "verbose": False, "cache": False, **options})


async def play(stack: Stack, run: Callable[[], Any], *script: Any) -> Episode:
    """The episode of what `run` starts while the model says this."""
    stack.upstream.script(*script)
    attempt = await stack.attempt()
    with attempt.running():
        await run()
    episode = await attempt.close()
    assert episode.unjoined == ()
    return episode


@pytest.fixture(name="stack")
async def a_stack() -> AsyncIterator[Stack]:
    async with attached_stack(plugin.crewai, timeout=300) as running:
        yield running
