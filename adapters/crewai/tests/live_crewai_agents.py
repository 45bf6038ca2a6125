"""CrewAI's own: crews, delegation, managers, its own text format, and its words for failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_servers import stack_fixture
from testing_aids import NO_TELEMETRY, only_this_machine, play, tools_by_call

os.environ.update(NO_TELEMETRY)

from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import BaseTool, tool

from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_crewai import crewai as adapter
from agl_server.testing import Stack, no_problems  # noqa: F401


@pytest.fixture(autouse=True)
def nothing_leaves_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A test fails if a name of another machine is looked up; what CrewAI stores is not in the user's home."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    with only_this_machine():
        yield


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("broken")
def broken(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


def llm_of(root: str, key: str = PLACEHOLDER_KEY, **options: Any) -> LLM:
    """A model that any number of attempts may share: which of them calls, the headers of its requests must say."""
    return LLM("default", provider="openai", base_url=root, api_key=key, **{"max_retries": 0, **options})


def agent_of(llm: Any, role: str, tools: tuple[BaseTool, ...] = (), **options: Any) -> Agent:
    return Agent(role=role, goal="Answer.", backstory="You know it.", llm=llm, tools=list(tools), **options)


def task_of(agent: Agent | None, text: str = "Answer it.", **options: Any) -> Task:
    return Task(description=text, expected_output="An answer.", agent=agent, **options)


def crew_of(*tasks: Task, **options: Any) -> Crew:
    agents = [task.agent for task in tasks if task.agent is not None]
    return Crew(**{"agents": agents, "tasks": list(tasks), "verbose": False, "cache": False, **options})


a_stack = stack_fixture(adapter, timeout=300)


ADDS = CallTools([("add", {"a": 1, "b": 2})])


async def test_delegated_work_is_that_of_the_coworker_and_a_tool_result(stack: Stack) -> None:
    llm = llm_of(stack.url())
    boss, expert = agent_of(llm, "Boss", allow_delegation=True), agent_of(llm, "Expert", (add,))

    def delegates(coworker: str) -> CallTools:
        given = {"task": "Add 1 and 2.", "context": "None.", "coworker": coworker}
        return CallTools([("delegate_work_to_coworker", given)])

    crew = crew_of(task_of(boss), agents=[boss, expert])
    script = (delegates("Expert"), ADDS, Say("3"), delegates("Nobody"), Say("It is 3."))
    episode = await play(stack, crew.kickoff_async, *script)
    delegated = "delegate_work_to_coworker"
    assert tools_by_call(episode) == [
        ("Boss", (delegated, "ok")),
        ("Expert", ("add", "ok")),
        ("Expert",),
        ("Boss", (delegated, "error")),
        ("Boss",),
    ]


async def test_the_manager_of_a_hierarchical_crew_has_crewais_name_for_it(stack: Stack) -> None:
    llm = llm_of(stack.url())
    expert = agent_of(llm, "Expert")
    crew = crew_of(task_of(None), agents=[expert], process=Process.hierarchical, manager_llm=llm)
    given = {"task": "Answer.", "context": "None.", "coworker": "Expert"}
    script = (CallTools([("delegate_work_to_coworker", given)]), Say("4"), Say("It is 4."))
    episode = await play(stack, crew.kickoff_async, *script)
    assert tools_by_call(episode) == [
        ("Crew Manager", ("delegate_work_to_coworker", "ok")),
        ("Expert",),
        ("Crew Manager",),
    ]


async def test_failures_in_crewais_own_words(stack: Stack) -> None:
    agent = agent_of(llm_of(stack.url()), "Solver", (broken,))
    script = (CallTools([("broken", {"reason": "no city"})]), CallTools([("nowhere", {})]))
    episode = await play(stack, crew_of(task_of(agent)).kickoff_async, *script, Say("Sorry."))
    assert tools_by_call(episode) == [
        ("Solver", ("broken", "error")),
        ("Solver", ("nowhere", "error")),
        ("Solver",),
    ]
    assert episode.transitions[0].tool_results[0].error == "ValueError: no city"


async def test_tools_that_are_asked_for_in_crewais_text_format(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(stack.url())
    monkeypatch.setattr(type(llm), "supports_function_calling", lambda self: False)
    agent = agent_of(llm, "Solver", (add,))
    step = Say('Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}')
    script = (step, Say("Thought: I now know it.\nFinal Answer: 3"))
    episode = await play(stack, crew_of(task_of(agent)).kickoff_async, *script)
    assert tools_by_call(episode) == [("Solver", ("add", "ok")), ("Solver",)]
