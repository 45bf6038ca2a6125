"""The pocket calculator: one operation with two numbers, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pocket_calculator import calculator


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
