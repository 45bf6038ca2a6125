"""The agent and its tool, against a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from calculator import calculator, evaluate
from demonstrations import TOOLS, behave, solve_it, write_words
from hypothesis import given
from hypothesis import strategies as st
from problems import Split, problem

Solve = Callable[[dict[str, str]], Awaitable[str]]


def calls_tool(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


@given(a=st.integers(-999, 999), b=st.integers(1, 999), operator=st.sampled_from("+-*/%"))
def test_evaluate_agrees_with_python(a: int, b: int, operator: str) -> None:
    assert evaluate(f"({a}) {operator} {b}") == eval(f"({a}) {operator} {b}")


@pytest.mark.parametrize(
    ("expression", "shown"), [("84/7", "12"), ("2-5", "-3"), ("1/3", "0.3333333333"), ("0.5*4", "2"), (" 1+1 ", "2")]
)
def test_calculator_shows_integers_without_a_point(expression: str, shown: str) -> None:
    assert calculator.invoke({"expression": expression}) == shown


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2+",
        "5 apples",
        "1/0",
        "2**9999",
        "9**9**9",
        "True+1",
        "'a'*9",
        "abs(3)",
        "__import__('os').getcwd()",
        "(1).real",
        "[1][0]",
        "1 if 1 else 2",
        "1<2",
        "x:=1",
        "1j",
        "1e999",
        "1e999-1e999",
        "+" * 101,
        "(" * 90,
        "\0",
    ],
)
def test_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"cannot|only|finite|characters|null"):
        calculator.invoke({"expression": expression})


@given(expression=st.text(max_size=120))
def test_calculator_raises_nothing_but_value_errors(expression: str) -> None:
    try:
        shown = calculator.invoke({"expression": expression})
    except ValueError:
        return
    assert float(shown) == pytest.approx(evaluate(expression))


async def test_the_agent_uses_its_tool_and_answers(solve: Solve, model: Any) -> None:
    model.replies = [calls_tool("12*7"), {"content": "The answer is 84."}]
    assert await solve({"question": "What is 12 times 7?"}) == "The answer is 84."
    assert [message["role"] for message in model.requests[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert model.requests[1]["messages"][-1]["content"] == "84"


async def test_a_failing_tool_is_told_to_the_model(solve: Solve, model: Any) -> None:
    model.replies = [calls_tool("12 times 7"), {"content": "I give up."}]
    assert await solve({"question": "What is 12 times 7?"}) == "I give up."
    assert model.requests[1]["messages"][-1]["content"] == "Error: cannot evaluate '12 times 7'"


async def test_an_agent_that_goes_round_in_circles_ends(solve: Solve, model: Any) -> None:
    model.replies = [calls_tool("1+1")]
    answer = await solve({"question": "What is 1 plus 1?"})
    assert not any(c.isdigit() for c in answer)
    assert len(model.requests) == 5


async def test_concurrent_rollouts_share_the_agent(solve: Solve, model: Any) -> None:
    model.replies = [{"content": "The answer is 2."}]
    answers = await asyncio.gather(*(solve({"question": f"What is {i}?"}) for i in range(8)))
    assert answers == ["The answer is 2."] * 8
    assert {request["messages"][1]["content"] for request in model.requests} == {f"What is {i}?" for i in range(8)}


@pytest.mark.parametrize("behaviour", [solve_it, write_words])
async def test_demonstrations_have_the_shape_of_what_langchain_sends(solve: Solve, model: Any, behaviour: Any) -> None:
    """The policy is warmed up on exactly what the agent will show it."""
    asked = problem(Split.TRAIN, 0, 0)
    shown = behave(behaviour, asked)
    model.replies = [message for message in shown if message["role"] == "assistant"]
    await solve({"question": asked.question})
    sent = model.requests[-1]
    for message in sent["messages"]:
        message.pop("name", None)
    assert sent["messages"] == shown[:-1]
    assert sent["tools"] == TOOLS


def test_the_agent_does_not_know_agl() -> None:
    for module in ("agent.py", "calculator.py"):
        assert "agl_" not in (Path(__file__).parents[1] / module).read_text()
