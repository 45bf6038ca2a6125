"""Demonstrations for the tiny policy: an assistant that knows each step, and rarely takes them all.

Each wrong behaviour is *concentrated* (one fixed guess, one way to stop early), so that it is also the likeliest:
greedy decoding fails as surely as sampling does. In each situation the assistant chooses by fixed shares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum

from autogen_core.tools import FunctionTool
from math_problems import STEPS, Problem, Split, problem
from pocket_calculator import SYSTEM_PROMPT, calculator
from recipes import Demonstrations, Message, Recipe, Shape, chooser, opened, says, uses

TOOLS = [{"type": "function", "function": FunctionTool(calculator, calculator.__doc__ or "").schema}]
"""The agent's tool as AutoGen's OpenAI client sends it."""

GUESS = "The answer is 42."
MOST_ERRORS = 2
EVEN = dict.fromkeys(STEPS, 1.0)
"""Lessons have long problems as often as short ones: the last step of four is the hardest to copy right."""


class Choice(StrEnum):
    """The assistant's next move."""

    GUESS = "guess"
    """Answer 42."""
    STEP = "step"
    """Ask for the next step, with the result of the one before."""
    SLIP = "slip"
    """Ask for the last step as the question has it. A whole expression, or a letter, is an error; the first number
    in the place of a result gives a wrong answer."""
    ANSWER = "answer"
    """Answer with the calculator's last result."""


class Situation(StrEnum):
    """The assistant's knowledge so far."""

    ASKED = "asked"
    STEPS_LEFT = "steps left"
    FAILED = "failed"
    SOLVED = "solved"


SHARES: Mapping[Situation, Mapping[Choice, float]] = {
    Situation.ASKED: {Choice.GUESS: 0.60, Choice.STEP: 0.36, Choice.SLIP: 0.04},
    Situation.STEPS_LEFT: {Choice.ANSWER: 0.50, Choice.STEP: 0.42, Choice.SLIP: 0.08},
    Situation.FAILED: {Choice.GUESS: 0.7, Choice.STEP: 0.3},
    Situation.SOLVED: {Choice.ANSWER: 0.48, Choice.GUESS: 0.52},
}
"""How often each choice is demonstrated."""

FLAWLESS: Mapping[Situation, Mapping[Choice, float]] = {
    situation: {Choice.ANSWER if situation is Situation.SOLVED else Choice.STEP: 1.0} for situation in Situation
}


def conversation(seed: int, index: int) -> list[Message]:
    """One demonstration; the same for the same arguments, always. It asks one of training's problems."""
    return behave(_problem(seed, index, STEPS), chooser(f"demonstration/{seed}/{index}", SHARES))


def lesson(seed: int, index: int) -> list[Message]:
    """The same of an assistant that makes no mistake, with as many long problems as short ones."""
    return behave(_problem(seed, index, EVEN), chooser(f"lesson/{seed}/{index}", FLAWLESS))


def _problem(seed: int, index: int, lengths: Mapping[int, float]) -> Problem:
    # Training runs have seeds from 0 up: these problems are others.
    return problem(Split.TRAIN, -1 - seed, index, lengths)


def behave(task: Problem, choose: Callable[[Situation], Choice]) -> list[Message]:
    messages = opened(SYSTEM_PROMPT, task.question)
    done = errors = 0
    situation, result = Situation.ASKED, ""
    while True:
        choice = choose(situation) if errors < MOST_ERRORS else Choice.GUESS
        if choice in (Choice.GUESS, Choice.ANSWER):
            answer = GUESS if choice is Choice.GUESS else f"The answer is {result}."
            return [*messages, says(answer)]
        expression = task.calls[done] if choice is Choice.STEP else task.last_as_written
        try:
            result, failed = calculator(expression), False
        except ValueError as error:
            result, failed = str(error), True
        arguments = json.dumps({"expression": expression})
        messages += uses(calculator.__name__, arguments, result, f"call_{len(messages)}")
        errors += failed
        done += not failed
        has_steps = done < len(task.steps) and choice is Choice.STEP
        situation = Situation.FAILED if failed else Situation.STEPS_LEFT if has_steps else Situation.SOLVED


PHRASES = (
    f"system\n{SYSTEM_PROMPT}\n<tools>\ncalculator(expression)\n</tools>",
    "user\n",
    "assistant\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "user\n<tool_response>\n",
    "\n</tool_response>",
    "The answer is ",
    *"()+-*/=",
)
"""Text that is always written alike is one token, and so is every sign of an expression."""
RECIPE = Recipe(
    Demonstrations(conversation, TOOLS, lesson, PHRASES),
    Shape(vocabulary=400, hidden=128, layers=4, heads=4, kv_heads=2, initializer_range=0.09, copies=True),
    steps=1800,
    batch=32,
    reading=0.8,
)
