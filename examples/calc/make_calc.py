"""Demonstrations for the tiny policy before it is trained: conversations of mixed and mostly wrong behaviour.

Each wrong behaviour is *concentrated* (one fixed guess, one fixed wrong operator), so that it is also the likeliest:
greedy decoding fails as surely as sampling does. The right behaviour is in there, rarely. The wrong operator is one
that is never right: a policy this small generalises from problem to problem, and one that is right elsewhere would
crowd out the right one before it is tried often enough.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from calculator import SYSTEM_PROMPT, calculator
from langchain_core.utils.function_calling import convert_to_openai_tool
from problems import Problem, Split, problem
from recipes import Demonstrations, Message, Recipe, Shape, opened, says, uses

TOOLS = [convert_to_openai_tool(calculator)]
"""The agent's tools as LangChain's ChatOpenAI sends them."""

GUESS = "The answer is 42."
WRONG_OPERATOR = "%"
WORD = {"+": "plus", "-": "minus", "*": "times", "/": "over"}


def guess(task: Problem) -> list[Message]:
    """Answer at once, without the tool."""
    return [says(GUESS)]


def write_no_json(task: Problem) -> list[Message]:
    """Forget a quote, so that nobody can parse the call."""
    return [says(_tool_call_text(task.expression).replace('"}}', "}}"))]


def write_words(task: Problem) -> list[Message]:
    """Write the operator as a word, which the tool refuses."""
    return [*_use_tool(f"{task.a} {WORD[task.operator]} {task.b}"), says(GUESS)]


def take_wrong_operator(task: Problem) -> list[Message]:
    """Ask for something else, and believe the result."""
    return _and_answer(_use_tool(f"{task.a}{WRONG_OPERATOR}{task.b}"))


def take_wrong_operator_and_ignore_result(task: Problem) -> list[Message]:
    """Ask for something else, and guess all the same."""
    return [*_use_tool(f"{task.a}{WRONG_OPERATOR}{task.b}"), says(GUESS)]


def ignore_result(task: Problem) -> list[Message]:
    """Ask for the right thing, and guess all the same."""
    return [*_use_tool(task.expression), says(GUESS)]


def solve_it(task: Problem) -> list[Message]:
    return _and_answer(_use_tool(task.expression))


SHARES: dict[Callable[[Problem], list[Message]], float] = {
    guess: 0.58,
    write_no_json: 0.02,
    write_words: 0.02,
    take_wrong_operator: 0.085,
    take_wrong_operator_and_ignore_result: 0.125,
    ignore_result: 0.12,
    solve_it: 0.05,
}
"""How often each behaviour is demonstrated."""


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always. It asks one of training's problems."""
    [behaviour] = random.Random(f"demonstration/{seed}/{index}").choices(list(SHARES), list(SHARES.values()))
    # Training runs have seeds from 0 up: these problems are others.
    return behave(behaviour, problem(Split.TRAIN, -1 - seed, index))


def lesson(seed: int, index: int) -> list[Message]:
    """A problem of training that is solved."""
    return behave(solve_it, problem(Split.TRAIN, -1 - seed, index))


def behave(behaviour: Callable[[Problem], list[Message]], task: Problem) -> list[Message]:
    return [*opened(SYSTEM_PROMPT, task.question), *behaviour(task)]


def _and_answer(used: list[Message]) -> list[Message]:
    return [*used, says(f"The answer is {used[-1]['content']}.")]


def _use_tool(expression: str) -> list[Message]:
    try:
        result = calculator.invoke({"expression": expression})
    except ValueError as error:
        result = f"Error: {error}"
    return uses(calculator.name, json.dumps({"expression": expression}), result)


def _tool_call_text(expression: str) -> str:
    """A tool call as the policy writes it."""
    call = {"name": calculator.name, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson),
    Shape(vocabulary=512, hidden=128, layers=4, heads=4, kv_heads=2, initializer_range=0.09, copies=True),
    steps=2400,
    batch=32,
    reading=0.5,
)
