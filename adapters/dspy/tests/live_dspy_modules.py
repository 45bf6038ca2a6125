"""What is particular to DSPy: programs of modules, ReAct in text, tools without ids, and the cache."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import dspy

from agl_core.capture import identify
from agl_core.testing.adapters.tools import tools_by_call
from agl_core.testing.fixtures import no_problems  # noqa: F401
from agl_core.testing.scripts import CallTools
from agl_core.testing.server import Stack

from .world import ANSWER, a_stack, acts, add, broken, fields, in_attempt, play  # noqa: F401


class Program(dspy.Module):  # type: ignore[misc]
    """A writer that uses tools, and a checker."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = dspy.ReAct("question -> answer", tools=[add, broken])
        self.checkers = [dspy.ChainOfThought("question, answer -> verdict")]

    def forward(self, question: str) -> Any:
        answer = self.writer(question=question).answer
        return self.checkers[0](question=question, answer=answer)

    async def aforward(self, question: str) -> Any:
        answer = (await self.writer.acall(question=question)).answer
        return await self.checkers[0].acall(question=question, answer=answer)


CHECKED = fields(reasoning="Yes.", verdict="right")
SCRIPT = (acts("add", a=1, b=2), acts("broken", reason="no city"), acts("finish"), ANSWER, CHECKED)
EPISODE = [
    ("writer", ("add", "ok")),
    ("writer", ("broken", "error")),
    ("writer",),
    ("writer",),
    ("checkers[0]",),
]


async def test_a_program_s_modules_have_the_names_of_its_attributes(stack: Stack) -> None:
    episode = await play(stack, Program(), *SCRIPT)
    assert tools_by_call(episode) == EPISODE
    added, failed = episode.transitions[0].tool_results[0], episode.transitions[1].tool_results[0]
    assert (added.arguments, added.result, added.adapter) == ({"a": 1, "b": 2}, 3, "dspy")
    assert failed.error == "ValueError: no city"


async def test_async_modules_are_seen_too(stack: Stack) -> None:
    program = Program()
    episode = await play(stack, lambda question: asyncio.run(program.acall(question=question)), *SCRIPT)
    assert tools_by_call(episode) == EPISODE


async def test_a_module_alone_has_the_name_of_the_code_around_it_or_of_its_class(stack: Stack) -> None:
    alone = dspy.ChainOfThought("question -> answer")
    assert tools_by_call(await play(stack, alone, ANSWER)) == [("ChainOfThought",)]
    with identify("critic"):
        assert tools_by_call(await play(stack, alone, ANSWER)) == [("critic",)]


async def test_a_module_inside_a_tool_speaks_for_itself(stack: Stack) -> None:
    class Boss(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.expert = dspy.Predict("task -> answer")
            self.boss = dspy.ReAct("question -> answer", tools=[dspy.Tool(self.ask, name="ask")])

        def ask(self, task: str) -> str:
            """Ask the expert."""
            return str(self.expert(task=task).answer)

        def forward(self, question: str) -> Any:
            return self.boss(question=question)

    script = (acts("ask", task="1 + 2"), fields(answer="3"), acts("finish"), ANSWER)
    assert tools_by_call(await play(stack, Boss(), *script)) == [
        ("boss", ("ask", "ok")),
        ("expert",),
        ("boss",),
        ("boss",),
    ]


async def test_tool_calls_that_the_program_executes_keep_their_ids(stack: Stack) -> None:
    class Own(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.caller = dspy.Predict("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")

        def forward(self, question: str) -> None:
            tools = [dspy.Tool(add), dspy.Tool(broken)]
            with dspy.context(adapter=dspy.ChatAdapter(use_native_function_calling=True)):
                found = self.caller(question=question, tools=tools)
            for each in found.calls.tool_calls:
                try:
                    each.execute(functions=tools)
                except RuntimeError as error:
                    assert "no city" in str(error)  # noqa: PT017

    asked = CallTools([("add", {"a": 1, "b": 2}, "c1"), ("broken", {"reason": "no city"}, "c2")])
    episode = await play(stack, Own(), asked)
    assert tools_by_call(episode) == [("caller", ("add", "ok"), ("broken", "error"))]
    results = episode.transitions[0].tool_results
    assert [each.tool_call_id for each in results] == ["c1", "c2"]
    assert results[1].error == "ValueError: no city"


async def test_in_a_rollout_the_cache_neither_answers_nor_keeps(stack: Stack) -> None:
    alone, said = dspy.Predict("question -> answer"), []
    for number in ("one", "two"):
        await play(stack, lambda question: said.append(alone(question=question).answer), fields(answer=number))
    assert said == ["one", "two"]

    attempt = await stack.attempt()
    stack.upstream.script(fields(answer="three"))
    question = str(uuid.uuid4())  # The cache is on disk, and outlives the tests.
    with dspy.context(lm=dspy.LM("openai/default", api_base=stack.url(attempt.key), api_key=stack.key(attempt.key))):
        outside = [(await asyncio.to_thread(alone, question=question)).answer for _ in range(2)]
    assert outside == ["three", "three"], "the second reply is the cache's"
    assert [call.agent for call in await attempt.calls()] == [None]
