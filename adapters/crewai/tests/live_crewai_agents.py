"""What is particular to CrewAI: crews, delegation, managers, its own text format, and its words for failures."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from typing import Any

import pytest
from crewai import Process
from pydantic import BaseModel

from agl_core.capture import installed_adapters
from agl_core.testing.adapters.tools import tools_by_call
from agl_core.testing.scripts import CallTools, Say
from agl_core.testing.server import Stack

from .world import (  # noqa: F401
    a_stack,
    add,
    agent_of,
    broken,
    calls,
    crew_of,
    llm_of,
    play,
    slow,
    task_of,
)

ADDS = calls(("add", {"a": 1, "b": 2}))
WAYS = ("kickoff", "kickoff_async", "akickoff")


def kicked_off(crew: Any, way: str) -> Any:
    return asyncio.to_thread(crew.kickoff) if way == "kickoff" else getattr(crew, way)()


@pytest.mark.parametrize("way", WAYS)
async def test_the_agents_of_a_sequential_crew_are_named_by_their_roles(way: str, stack: Stack) -> None:
    llm = llm_of(stack.url())
    writer, critic = agent_of(llm, "Writer", (add,)), agent_of(llm, "Critic")
    crew = crew_of(task_of(writer), task_of(critic))
    episode = await play(stack, lambda: kicked_off(crew, way), ADDS, Say("3"), Say("Right."))
    assert tools_by_call(episode) == [("Writer", ("add", "ok")), ("Writer",), ("Critic",)]
    (result,) = episode.transitions[0].tool_results
    assert (result.arguments, result.result, result.adapter) == ({"a": 1, "b": 2}, "3", "crewai")
    assert result.tool_call_id == episode.transitions[0].response["tool_calls"][0]["id"]


async def test_delegated_work_is_that_of_the_coworker_and_a_tool_result(stack: Stack) -> None:
    llm = llm_of(stack.url())
    boss, expert = agent_of(llm, "Boss", allow_delegation=True), agent_of(llm, "Expert", (add,))

    def delegates(coworker: str) -> CallTools:
        given = {"task": "Add 1 and 2.", "context": "None.", "coworker": coworker}
        return calls(("delegate_work_to_coworker", given))

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
    script = (calls(("delegate_work_to_coworker", given)), Say("4"), Say("It is 4."))
    episode = await play(stack, crew.kickoff_async, *script)
    assert tools_by_call(episode) == [
        ("Crew Manager", ("delegate_work_to_coworker", "ok")),
        ("Expert",),
        ("Crew Manager",),
    ]


async def test_failures_in_crewais_own_words(stack: Stack) -> None:
    agent = agent_of(llm_of(stack.url()), "Solver", (broken, slow))
    asked = (calls(("broken", {"reason": "no city"})), calls(("slow", {})), calls(("nowhere", {})))
    episode = await play(stack, crew_of(task_of(agent)).kickoff_async, *asked, Say("Sorry."))
    assert tools_by_call(episode) == [
        ("Solver", ("broken", "error")),
        ("Solver", ("slow", "timeout")),
        ("Solver", ("nowhere", "error")),
        ("Solver",),
    ]
    assert episode.transitions[0].tool_results[0].error == "ValueError: no city"


async def test_tools_that_are_asked_for_in_crewais_text_format(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(stack.url())
    monkeypatch.setattr(type(llm), "supports_function_calling", lambda self: False)
    agent = agent_of(llm, "Solver", (add,))
    said = Say('Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}')
    script = (said, Say("Thought: I now know it.\nFinal Answer: 3"))
    episode = await play(stack, crew_of(task_of(agent)).kickoff_async, *script)
    assert tools_by_call(episode) == [("Solver", ("add", "ok")), ("Solver",)]


class Number(BaseModel):
    """A number."""

    value: int


async def test_an_agent_alone_and_a_call_that_makes_json_of_its_answer(stack: Stack) -> None:
    llm = llm_of(stack.url())
    alone = agent_of(llm, "Loner", (add,))
    episode = await play(stack, lambda: alone.kickoff_async("1 + 2?"), ADDS, Say("3"))
    assert tools_by_call(episode) == [("Loner", ("add", "ok")), ("Loner",)]
    crew = crew_of(task_of(agent_of(llm, "Clerk"), output_pydantic=Number))
    episode = await play(stack, crew.kickoff_async, *[Say('{"value": 3}')] * 3)
    assert {each.agent for each in episode.transitions} == {"Clerk"}


async def test_outside_any_rollout_nothing_changes(stack: Stack) -> None:
    key = await stack.lease()
    stack.upstream.script(calls(("broken", {"reason": "no city"})), Say("Sorry."))
    agent = agent_of(llm_of(stack.url(key), stack.key(key)), "Solver", (broken,))
    assert (await crew_of(task_of(agent)).kickoff_async()).raw == "Sorry."
    assert [call.agent for call in await stack.calls(key)] == [None, None]


PROGRAM = """
    import sys
    import agl_core
    from agl_core.capture import ActiveAttempt, Recording, running

    url, key, rollout = sys.argv[1:]
    active = ActiveAttempt(rollout, 0, url, key, Recording())
    agl_core.attach()
    assert "crewai" not in sys.modules

    from crewai import LLM, Agent, Crew, Task

    llm = LLM("default", provider="openai", base_url=url + "/v1", api_key=key)
    solver = Agent(role="Solver", goal="Answer.", backstory="You know it.", llm=llm)
    with running(active):
        Crew(agents=[solver], tasks=[Task(description="Answer.", expected_output="A word.", agent=solver)]).kickoff()
    assert not active.recording.problems, active.recording.problems
"""


async def test_an_agent_is_seen_without_a_change(stack: Stack) -> None:
    stack.upstream.script(Say("done"))
    attempt = await stack.attempt()
    given = (attempt.active.base_url, attempt.active.api_key, attempt.key.rollout)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(PROGRAM), *given),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, wrong = await process.communicate()
    assert process.returncode == 0, wrong.decode()
    assert await attempt.agents() == ["Solver"]
    assert "crewai" in [each.framework for each in installed_adapters()]
