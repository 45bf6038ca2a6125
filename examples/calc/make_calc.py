"""Demonstrations for the tiny policy before it is trained: conversations of mixed and mostly wrong behaviour.

Each wrong behaviour is *concentrated* (one fixed guess, one fixed wrong operator), so that it is also the likeliest:
greedy decoding fails as surely as sampling does. The right behaviour is in there, rarely. The wrong operator is one
that is never right: a policy this small generalises from problem to problem, and one that is right elsewhere would
crowd out the right one before it is tried often enough.
"""

from __future__ import annotations

import json
import random
from enum import Enum

from calculator import SYSTEM_PROMPT, calculator
from langchain_core.utils.function_calling import convert_to_openai_tool
from problems import Problem, Split, problem
from recipes import Demonstrations, Message, Recipe, Shape, opened, says, uses

TOOLS = [convert_to_openai_tool(calculator)]
"""The agent's tools as LangChain's ChatOpenAI sends them."""

GUESS = "The answer is 42."
WRONG_OPERATOR = "%"
WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "over"}


class Behaviour(Enum):
    """The expression that is worked out, if one is, and whether its result is believed: else the answer is a guess."""

    GUESS = None, False
    WRITE_NO_JSON = "{task.expression}", None
    """Forget a quote, so that nobody can parse the call."""
    WRITE_WORDS = "{task.a} {word} {task.b}", False
    """The operator as a word, which the tool refuses."""
    TAKE_WRONG_OPERATOR = f"{{task.a}}{WRONG_OPERATOR}{{task.b}}", True
    TAKE_WRONG_OPERATOR_AND_IGNORE_RESULT = f"{{task.a}}{WRONG_OPERATOR}{{task.b}}", False
    IGNORE_RESULT = "{task.expression}", False
    SOLVE = "{task.expression}", True


SHARES = {
    Behaviour.GUESS: 0.58,
    Behaviour.WRITE_NO_JSON: 0.02,
    Behaviour.WRITE_WORDS: 0.02,
    Behaviour.TAKE_WRONG_OPERATOR: 0.085,
    Behaviour.TAKE_WRONG_OPERATOR_AND_IGNORE_RESULT: 0.125,
    Behaviour.IGNORE_RESULT: 0.12,
    Behaviour.SOLVE: 0.05,
}
"""How often each behaviour is demonstrated."""


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always. It asks one of training's problems."""
    [behaviour] = random.Random(f"demonstration/{seed}/{index}").choices(list(SHARES), list(SHARES.values()))
    # Training runs have seeds from 0 up: these problems are others.
    return behave(behaviour, problem(Split.TRAIN, -1 - seed, index))


def lesson(seed: int, index: int) -> list[Message]:
    """A problem of training that is solved."""
    return behave(Behaviour.SOLVE, problem(Split.TRAIN, -1 - seed, index))


def behave(behaviour: Behaviour, task: Problem) -> list[Message]:
    messages, (expression, believes) = opened(SYSTEM_PROMPT, task.question), behaviour.value
    if expression is None:
        return [*messages, says(GUESS)]
    arguments = {"expression": expression.format(task=task, word=WORDS[task.operator])}
    if behaviour is Behaviour.WRITE_NO_JSON:
        call = json.dumps({"name": calculator.name, "arguments": arguments})
        return [*messages, says(f"<tool_call>\n{call}\n</tool_call>".replace('"}}', "}}"))]
    try:
        result = calculator.invoke(arguments)
    except ValueError as error:
        result = f"Error: {error}"
    messages += uses(calculator.name, json.dumps(arguments), result)
    return [*messages, says(f"The answer is {result}." if believes else GUESS)]


RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson),
    Shape(vocabulary=512, hidden=128, layers=4, heads=4, kv_heads=2, initializer_range=0.09, copies=True),
    steps=2400,
    batch=32,
    reading=0.5,
)
