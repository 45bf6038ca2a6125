"""The agent and its tool, against a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_math_policy import TOOLS
from math_demonstrations import SHARES, Choice, Situation, behave
from math_problems import Split, problem
from pocket_calculator import calculator

Solve = Callable[[dict[str, str]], Awaitable[str]]


def calls_tool(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


@given(a=st.integers(-999, 999), b=st.integers(1, 999), operator=st.sampled_from("+-*/"))
def test_the_calculator_agrees_with_python(a: int, b: int, operator: str) -> None:
    assert float(calculator(f"{a} {operator} {b}")) == pytest.approx(eval(f"({a}) {operator} {b}"))


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("84/7", "12"), ("2-5", "-3"), ("1/3", "0.3333333333"), ("0.5*4", "2"), (" 1 + 1 ", "2"), ("3--2", "5")],
)
def test_the_calculator_shows_integers_without_a_point(expression: str, shown: str) -> None:
    assert calculator(expression) == shown


@pytest.mark.parametrize("expression", ["", "7", "a*3", "1+2+3", "(1+2)*3", "2**9", "1+", "9" * 30 + "*2", "١+١"])
def test_the_calculator_does_one_operation_with_two_numbers(expression: str) -> None:
    with pytest.raises(ValueError, match="one operation with two numbers"):
        calculator(expression)


@given(expression=st.text(max_size=40))
def test_the_calculator_raises_nothing_but_value_errors(expression: str) -> None:
    try:
        shown = calculator(expression)
    except ValueError:
        return
    float(shown)


async def test_a_result_goes_into_the_next_call(solve: Solve, model: Any) -> None:
    model.replies = [calls_tool("12*7"), calls_tool("84-4"), {"content": "The answer is 80."}]
    assert await solve({"question": "What is (12*7)-4?"}) == "The answer is 80."
    said = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert said == ["84", "80"]


@pytest.mark.parametrize(
    ("expression", "error"),
    [("a*3", "Error: write one operation with two numbers"), ("3/0", "Error: division by zero")],
)
async def test_the_model_reads_the_error_of_a_tool(solve: Solve, model: Any, expression: str, error: str) -> None:
    model.replies = [calls_tool(expression), {"content": "I give up."}]
    assert await solve({"question": "What is a*3?"}) == "I give up."
    assert model.requests[1]["messages"][-1]["content"] == error


async def test_an_agent_that_goes_round_in_circles_ends_without_an_answer(solve: Solve, model: Any) -> None:
    model.replies = [calls_tool("1+1")]
    answer = await solve({"question": "What is 1+1?"})
    assert not any(c.isdigit() for c in answer)
    assert len(model.requests) == 5


async def test_rollouts_at_the_same_time_do_not_mix(solve: Solve, model: Any) -> None:
    model.replies = [{"content": "The answer is 2."}]
    answers = await asyncio.gather(*(solve({"question": f"What is {i}?"}) for i in range(8)))
    assert answers == ["The answer is 2."] * 8
    asked = [[m["content"] for m in request["messages"] if m["role"] == "user"] for request in model.requests]
    assert sorted(asked) == [[f"What is {i}?"] for i in range(8)]


def flawless(situation: Situation) -> Choice:
    return Choice.ANSWER if situation is Situation.SOLVED else Choice.STEP


def slips_at_once(situation: Situation) -> Choice:
    return Choice.SLIP if situation is Situation.ASKED else Choice.GUESS


@pytest.mark.parametrize("behaviour", [flawless, slips_at_once])
@pytest.mark.parametrize("index", range(6))
async def test_demonstrations_have_the_shape_of_what_autogen_sends(
    solve: Solve, model: Any, behaviour: Callable[[Situation], Choice], index: int
) -> None:
    """The policy is warmed up on exactly what the agent will show it."""
    asked = problem(Split.TRAIN, 0, index)
    shown = behave(asked, behaviour)
    model.replies = [message for message in shown if message["role"] == "assistant"]
    await solve({"question": asked.question})
    sent = model.requests[-1]
    for message in sent["messages"]:
        message.pop("name", None)
    assert sent["messages"] == shown[:-1]
    assert sent["tools"] == TOOLS


def test_wrong_choices_are_likelier_than_right_ones_wherever_an_answer_is_due() -> None:
    assert SHARES.keys() == set(Situation)
    assert all(sum(shares.values()) == pytest.approx(1) for shares in SHARES.values())
    assert max(SHARES[Situation.ASKED], key=SHARES[Situation.ASKED].__getitem__) is Choice.GUESS
    assert max(SHARES[Situation.STEPS_LEFT], key=SHARES[Situation.STEPS_LEFT].__getitem__) is Choice.ANSWER


def test_the_agent_does_not_know_agl() -> None:
    for name in ("math_agent.py", "pocket_calculator.py"):
        source = (Path(__file__).parents[1] / name).read_text()
        assert "import agl" not in source
        assert "from agl" not in source
