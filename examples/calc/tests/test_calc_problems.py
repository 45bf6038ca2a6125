"""The problems: right, repeatable, and with held-out parts that training can never meet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from make_calc import WRONG_OPERATOR, conversation
from problems import (
    OPERATORS,
    TRAINED_TEMPLATES,
    Problem,
    Split,
    pair_is_held_out,
    problem,
)

SPLITS, SEEDS, INDICES = st.sampled_from(Split), st.integers(-5, 10**6), st.integers(0, 10**9)


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_a_problem_is_repeatable_and_its_result_is_right(split: Split, seed: int, index: int) -> None:
    made = problem(split, seed, index)
    assert made == problem(split, seed, index)
    assert eval(made.expression) == int(made.result)
    assert int(made.result) > 0
    assert "{" not in made.question


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_the_wrong_operator_is_never_right(split: Split, seed: int, index: int) -> None:
    """Else the warm-up's wrong behaviour would be rewarded."""
    made = problem(split, seed, index)
    assert eval(f"{made.a}{WRONG_OPERATOR}{made.b}") != int(made.result)


@given(seed=SEEDS, index=INDICES)
def test_training_and_warm_up_never_meet_what_is_held_out(seed: int, index: int) -> None:
    made = problem(Split.TRAIN, seed, index)
    assert not pair_is_held_out(made.a, made.operator, made.b)
    assert made.template in TRAINED_TEMPLATES[made.operator]


def test_seeds_give_fresh_problems_and_a_set_has_few_repetitions() -> None:
    def first(split: Split, seed: int) -> list[Problem]:
        return [problem(split, seed, index) for index in range(200)]

    assert len(set(first(Split.TRAIN, 0)) & set(first(Split.TRAIN, 1))) <= 2
    for split in (Split.EVAL, Split.EVAL_TEMPLATES):
        assert len(set(first(split, 0))) >= 190
        assert {made.operator for made in first(split, 0)} == set(OPERATORS)


def test_warm_up_asks_training_problems_in_mostly_wrong_conversations() -> None:
    held_out = {problem(split, 0, i).question for split in (Split.EVAL, Split.EVAL_TEMPLATES) for i in range(200)}
    asked = [conversation(0, index)[1]["content"] for index in range(2000)]
    assert not held_out & set(asked)
    trained = {problem(Split.TRAIN, -1, index).question for index in range(2000)}
    assert set(asked) == trained
