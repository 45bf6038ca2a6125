"""The problems: right, repeatable, of several steps, and with held-out parts that training can never meet."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_math import EVEN, conversation, lesson
from math_problems import (
    HELD_OUT_NUMBERS,
    Split,
    operators_are_held_out,
    problem,
)
from pocket_calculator import calculator

SPLITS, SEEDS, INDICES = st.sampled_from(Split), st.integers(-5, 10**6), st.integers(0, 10**9)


def numbers(question: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", question)]


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_each_result_goes_into_the_next_call_and_the_last_one_is_the_answer(
    split: Split, seed: int, index: int
) -> None:
    made = problem(split, seed, index)
    shown = [calculator(call) for call in made.calls]
    assert 2 <= len(shown) <= 4
    assert shown == [str(result) for result in made.results]
    assert all(re.search(rf"(?<!\d){result}(?!\d)", call) for result, call in zip(shown, made.calls[1:], strict=False))
    assert made.result == shown[-1]


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_stopping_early_and_guessing_are_never_right(split: Split, seed: int, index: int) -> None:
    """Else the warm-up's wrong behaviour would be rewarded."""
    made = problem(split, seed, index)
    assert made.result not in ("42", *map(str, made.results[:-1]), *map(str, numbers(made.question)))


@given(seed=SEEDS, index=INDICES)
def test_training_and_warm_up_never_meet_what_is_held_out(seed: int, index: int) -> None:
    made = problem(Split.TRAIN, seed, index)
    assert not set(numbers(made.question)) & set(HELD_OUT_NUMBERS)
    assert not operators_are_held_out(made.operators)


def test_seeds_give_fresh_problems_and_a_set_has_few_repetitions() -> None:
    first, second = ({problem(Split.TRAIN, seed, index).question for index in range(200)} for seed in (0, 1))
    assert not first & second
    for split in Split:
        assert len({problem(split, 0, index).question for index in range(100)}) >= 98


def test_warm_up_asks_training_problems_in_mostly_wrong_conversations() -> None:
    made = [problem(Split.TRAIN, -1, index) for index in range(2000)]
    shown = [conversation(0, index) for index in range(2000)]
    assert [messages[1]["content"] for messages in shown] == [each.question for each in made]
    right = sum(
        messages[-1]["content"] == f"The answer is {each.result}." for messages, each in zip(shown, made, strict=True)
    )
    assert 0.01 < right / len(made) < 0.10


@pytest.mark.parametrize("index", range(20))
def test_lessons_are_right(index: int) -> None:
    assert lesson(0, index)[-1]["content"] == f"The answer is {problem(Split.TRAIN, -1, index, EVEN).result}."
