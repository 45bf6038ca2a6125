"""DSPy's own: programs of modules, ReAct in text, tools without ids, and the cache."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import dspy
import pytest
import testing_aids
from running_servers import stack_fixture
from testing_aids import tools_by_call

from agl_core.client.agent import PLACEHOLDER_KEY
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Episode
from agl_dspy import dspy as adapter
from agl_server.testing import Stack, no_problems  # noqa: F401


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def broken(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


def fields(**values: Any) -> Say:
    """A model's reply in the form of DSPy's ChatAdapter."""
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

    def ask() -> None:
        with dspy.context(lm=lm_of(stack)):
            program(question="1 + 2?")

    return await testing_aids.play(stack, ask, *script)


a_stack = stack_fixture(adapter, timeout=300)


class Program(dspy.Module):  # type: ignore[misc]
    """A writer that uses tools, and a checker."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = dspy.ReAct("question -> answer", tools=[add, broken])
        self.checkers = [dspy.ChainOfThought("question, answer -> verdict")]

    def forward(self, question: str) -> Any:
        answer = self.writer(question=question).answer
        return self.checkers[0](question=question, answer=answer)


CHECKED = fields(reasoning="Yes.", verdict="right")
SCRIPT = (acts("add", a=1, b=2), acts("broken", reason="no city"), acts("finish"), ANSWER, CHECKED)


async def test_a_program_s_modules_have_the_names_of_its_attributes(stack: Stack) -> None:
    episode = await play(stack, Program(), *SCRIPT)
    assert tools_by_call(episode) == [
        ("writer", ("add", "ok")),
        ("writer", ("broken", "error")),
        ("writer",),
        ("writer",),
        ("checkers[0]",),
    ]
    added, failed = episode.transitions[0].tool_results[0], episode.transitions[1].tool_results[0]
    assert (added.arguments, added.result, added.adapter) == ({"a": 1, "b": 2}, 3, "dspy")
    assert failed.error == "ValueError: no city"


async def test_tool_calls_that_the_program_executes_keep_their_ids(stack: Stack) -> None:
    class Own(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.caller = dspy.Predict("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")

        def forward(self, question: str) -> None:
            tools = [dspy.Tool(add), dspy.Tool(broken)]
            with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
                prediction = self.caller(question=question, tools=tools)
            for call in prediction.calls.tool_calls:
                try:
                    call.execute(functions=tools)
                except RuntimeError as error:
                    assert "no city" in str(error)  # noqa: PT017

    reply = CallTools([("add", {"a": 1, "b": 2}, "c1"), ("broken", {"reason": "no city"}, "c2")])
    episode = await play(stack, Own(), reply)
    assert tools_by_call(episode) == [("caller", ("add", "ok"), ("broken", "error"))]
    results = episode.transitions[0].tool_results
    assert [t.tool_call_id for t in results] == ["c1", "c2"]
    assert results[1].error == "ValueError: no city"


async def test_in_a_rollout_the_cache_neither_answers_nor_keeps(stack: Stack) -> None:
    alone, answers = dspy.Predict("question -> answer"), []
    for number in ("one", "two"):
        await play(stack, lambda question: answers.append(alone(question=question).answer), fields(answer=number))
    assert answers == ["one", "two"]

    attempt = await stack.attempt()
    stack.upstream.script(fields(answer="three"))
    question = str(uuid.uuid4())  # The cache is on disk, and outlives the tests.
    with dspy.context(lm=dspy.LM("openai/default", api_base=stack.url(attempt.key), api_key=stack.key(attempt.key))):
        outside = [(await asyncio.to_thread(alone, question=question)).answer for _ in range(2)]
    assert outside == ["three", "three"], "the second reply is the cache's"
    assert [call.agent for call in await attempt.calls()] == [None]


class Streamed(dspy.Module):  # type: ignore[misc]
    """A draft, and an answer that is streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.drafter = dspy.ReAct("question -> draft", tools=[add])
        self.writer = dspy.Predict("question, draft -> answer")

    def forward(self, question: str) -> Any:
        return self.writer(question=question, draft=self.drafter(question=question).draft)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_in_the_threads_of_streamify_calls_and_tools_have_their_agents(stack: Stack, asynchronous: bool) -> None:
    values: list[Any] = []

    async def read(stream: AsyncIterator[Any]) -> None:
        values.extend([value async for value in stream])

    def program(question: str) -> None:
        stream = dspy.streamify(
            Streamed(), stream_listeners=[dspy.streaming.StreamListener("answer")], async_streaming=asynchronous
        )(question=question)
        asyncio.run(read(stream)) if asynchronous else values.extend(stream)

    drafted = fields(reasoning="So.", draft="It is 3.")
    episode = await play(
        stack, program, acts("add", a=1, b=2), acts("finish"), drafted, fields(answer="The answer is 3, I think.")
    )
    assert tools_by_call(episode) == [("drafter", ("add", "ok")), ("drafter",), ("drafter",), ("writer",)]
    chunks = [value.chunk for value in values if isinstance(value, dspy.streaming.StreamResponse)]
    assert "".join(chunks) == "The answer is 3, I think."
    assert isinstance(values[0], dspy.streaming.StatusMessage)
    assert isinstance(values[-1], dspy.Prediction)
