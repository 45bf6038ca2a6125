"""smolagents' own: code, managed agents, agents without a name, streams, its words for failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import testing_aids
from running_servers import stack_fixture
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool
from testing_aids import tools_by_call

from agl_core.capture import identify
from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Episode
from agl_server.testing import Stack, no_problems  # noqa: F401
from agl_smolagents import smolagents as adapter


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
    """The reply of a model that writes this code."""
    return Say(f"Thought: I write code.\n```py\n{text}\n```")


ANSWER = CallTools([("final_answer", {"answer": "done"})])


def built(kind: Callable[..., Any], model: Any, **options: Any) -> Any:
    """An agent that prints nothing."""
    return kind(**{"tools": [add, broken], "model": model, "verbosity_level": LogLevel.OFF, **options})


def model_of(stack: Stack) -> OpenAIServerModel:
    """A model that any number of attempts may share: which of them calls, the headers of its requests must say."""
    return OpenAIServerModel("default", stack.url(), PLACEHOLDER_KEY, client_kwargs={"max_retries": 0})


async def play(stack: Stack, agent: Any, *script: Any) -> Episode:
    """The episode of an agent whose model says this."""
    return await testing_aids.play(stack, lambda: agent.run("hello"), *script)


a_stack = stack_fixture(adapter, timeout=300)


async def test_tools_that_code_calls_belong_to_the_call_that_wrote_the_code(stack: Stack) -> None:
    writes = code("x = add(1, 2)\ny = add(a=x, b=4)\nprint(y)")
    episode = await play(stack, built(CodeAgent, model_of(stack), name="coder"), writes, code("final_answer('7')"))
    assert tools_by_call(episode) == [
        ("coder", ("add", "ok"), ("add", "ok"), ("python_interpreter", "ok")),
        ("coder", ("python_interpreter", "ok")),
    ]
    first, second, whole = episode.transitions[0].tool_results
    assert [(t.arguments, t.result) for t in (first, second)] == [
        ({"a": 1, "b": 2}, 3),
        ({"a": 3, "b": 4}, 7),
    ]
    assert whole.result["logs"].strip() == "7"
    assert "y = add(a=x, b=4)" in whole.arguments
    assert {t.adapter for t in (first, second, whole)} == {"smolagents"}


async def test_an_exception_of_the_code_is_its_error_and_that_of_a_tool_is_the_tools(stack: Stack) -> None:
    agent = built(CodeAgent, model_of(stack), name="coder")
    caught = "try:\n    broken('a')\nexcept ValueError:\n    print('caught')"
    episode = await play(
        stack, agent, code("1 / 0"), code("broken('no city')"), code(caught), code("x = ("), code("final_answer(1)")
    )
    assert tools_by_call(episode) == [
        ("coder", ("python_interpreter", "error")),
        ("coder", ("broken", "error")),
        ("coder", ("broken", "error"), ("python_interpreter", "ok")),
        ("coder", ("python_interpreter", "error")),
        ("coder", ("python_interpreter", "ok")),
    ]
    errors = [t.tool_results[0].error for t in episode.transitions[:2]]
    assert errors[0].startswith("InterpreterError: Code execution failed at line '1 / 0' due to: ZeroDivisionError")
    assert errors[1] == "ValueError: no city"


async def test_failures_in_smolagents_own_words(stack: Stack) -> None:
    agent = built(ToolCallingAgent, model_of(stack), name="solver")
    script = [("broken", {"reason": "no city"}), ("nowhere", {}), ("add", {"a": 1}), ("final_answer", {})]
    episode = await play(stack, agent, *(CallTools([call]) for call in script), ANSWER)
    assert tools_by_call(episode)[:4] == [("solver", (tool, "error")) for tool, _ in script]
    errors = [t.tool_results[0].error for t in episode.transitions[:3]]
    assert "Error executing tool 'broken' with arguments {'reason': 'no city'}: ValueError: no city" in errors[0]
    assert "nknown tool nowhere, should be one of" in errors[1]
    assert "rgument" in errors[2]


async def test_a_tool_call_in_text_belongs_to_the_call_that_said_it(stack: Stack) -> None:
    agent = built(ToolCallingAgent, model_of(stack), name="solver")
    reply = Say('Action:\n{"name": "add", "arguments": {"a": 1, "b": 2}}')
    episode = await play(stack, agent, reply, ANSWER)
    assert tools_by_call(episode) == [("solver", ("add", "ok")), ("solver",)]
    assert episode.transitions[0].tool_results[0].tool_call_id is None


async def test_an_agent_without_a_name_has_that_of_the_code_around_it_or_of_its_class(stack: Stack) -> None:
    agent = built(ToolCallingAgent, model_of(stack))
    assert tools_by_call(await play(stack, agent, ANSWER)) == [("ToolCallingAgent",)]
    with identify("critic"):
        assert tools_by_call(await play(stack, agent, ANSWER)) == [("critic",)]
