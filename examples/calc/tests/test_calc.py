"""The problems: right, repeatable, and with held-out parts that training can never meet; and the calculator."""

from __future__ import annotations

import pytest
from calculator import calculator, evaluate
from hypothesis import given
from hypothesis import strategies as st
from make_calc import WRONG_OPERATOR
from problems import TRAINED_TEMPLATES, Split, pair_is_held_out, problem

SPLITS, SEEDS, INDICES = st.sampled_from(Split), st.integers(-5, 10**6), st.integers(0, 10**9)


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_a_problem_is_repeatable_and_its_result_is_right(split: Split, seed: int, index: int) -> None:
    drawn = problem(split, seed, index)
    assert drawn == problem(split, seed, index)
    assert eval(drawn.expression) == int(drawn.result)
    assert int(drawn.result) > 0
    assert "{" not in drawn.question


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_the_wrong_operator_is_never_right(split: Split, seed: int, index: int) -> None:
    """Else the warm-up's wrong behaviour would be rewarded."""
    drawn = problem(split, seed, index)
    assert eval(f"{drawn.a}{WRONG_OPERATOR}{drawn.b}") != int(drawn.result)


@given(seed=SEEDS, index=INDICES)
def test_training_and_warm_up_never_meet_what_is_held_out(seed: int, index: int) -> None:
    drawn = problem(Split.TRAIN, seed, index)
    assert not pair_is_held_out(drawn.a, drawn.operator, drawn.b)
    assert drawn.template in TRAINED_TEMPLATES[drawn.operator]


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
