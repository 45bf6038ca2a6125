"""The problems of several steps, with parts that training can never meet; the calculator; the loader of Calc-X."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_math import EVEN, lesson
from math_problems import HELD_OUT_NUMBERS, Split, operators_are_held_out, problem
from pocket_calculator import calculator

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

SPLITS, SEEDS, INDICES = st.sampled_from(Split), st.integers(-5, 10**6), st.integers(0, 10**9)


def numbers(question: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", question)]


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_each_result_goes_into_the_next_call_and_the_last_one_is_the_answer(
    split: Split, seed: int, index: int
) -> None:
    drawn = problem(split, seed, index)
    shown = [calculator(call) for call in drawn.calls]
    assert 2 <= len(shown) <= 4
    assert shown == [str(result) for result in drawn.results]
    assert all(re.search(rf"(?<!\d){result}(?!\d)", call) for result, call in zip(shown, drawn.calls[1:], strict=False))
    assert drawn.result == shown[-1]


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_stopping_early_and_guessing_are_never_right(split: Split, seed: int, index: int) -> None:
    """Else the warm-up's wrong behaviour would be rewarded."""
    drawn = problem(split, seed, index)
    assert drawn.result not in ("42", *map(str, drawn.results[:-1]), *map(str, numbers(drawn.question)))


@given(seed=SEEDS, index=INDICES)
def test_training_and_warm_up_never_meet_what_is_held_out(seed: int, index: int) -> None:
    drawn = problem(Split.TRAIN, seed, index)
    assert not set(numbers(drawn.question)) & set(HELD_OUT_NUMBERS)
    assert not operators_are_held_out(drawn.operators)


def test_lessons_are_right() -> None:
    for index in range(20):
        assert lesson(0, index)[-1]["content"] == f"The answer is {problem(Split.TRAIN, -1, index, EVEN).result}."


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


EXAMPLES = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "data" / "calc_x.jsonl"


def tasks(file: Path) -> Any:
    component = Plugins.load([EXAMPLES / "calc_x.py"]).component(kinds.TASK_SOURCE, "calc-x", "[tasks]")
    return component.build(component.options.model_validate({"path": str(file)}), EXAMPLES, 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_read_in_their_own_format_as_they_are_published(tmp_path: Path, suffix: str) -> None:
    """A number, a fraction, an option's letter, and a subset without ids and `result_float`."""
    file = ROWS
    if suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
        parquet.write_table(pyarrow.Table.from_pylist(rows), file := tmp_path / "train.parquet")
    source = tasks(file)
    read = [source.task(index) for index in range(source.size)]
    assert [task.metadata["result"] for task in read] == ["66", "0.375", "12", "3000"]
    assert [task.id for task in read] == ["gsm8k__a1", "ape210k__b2", "math_qa__c3", "3"]
    assert all(task.input.keys() == {"question"} for task in read)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"question": "2+3?"}', "row 0: has no 'result'"),
        ('{"question": "2+3?", "result": "B"}', "row 0: the result 'B' is no number"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_row_in_another_format_is_named(tmp_path: Path, row: str, error: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=error):
        tasks(tmp_path / "rows.jsonl")
