"""The problems: right, repeatable, and with held-out parts that training can never meet."""

from __future__ import annotations

from itertools import islice, product

import pytest
from demonstrations import SHARES, WRONG_OPERATOR, conversation
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    HELD_OUT_TEMPLATES,
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


@given(split=SPLITS, seed=SEEDS, index=INDICES)
def test_a_question_shows_both_numbers_in_the_order_of_the_expression(split: Split, seed: int, index: int) -> None:
    made = problem(split, seed, index)
    digits = "".join(c if c.isdigit() else " " for c in made.question).split()
    assert digits == [str(made.a), str(made.b)]


@given(seed=SEEDS, index=INDICES)
def test_training_and_warm_up_never_meet_what_is_held_out(seed: int, index: int) -> None:
    made = problem(Split.TRAIN, seed, index)
    assert not pair_is_held_out(made.a, made.operator, made.b)
    assert made.template in TRAINED_TEMPLATES[made.operator]


@given(index=INDICES)
def test_held_out_sets_differ_from_training_in_one_thing_each(index: int) -> None:
    pairs, templates = problem(Split.EVAL, 0, index), problem(Split.EVAL_TEMPLATES, 0, index)
    assert pair_is_held_out(pairs.a, pairs.operator, pairs.b)
    assert pairs.template in TRAINED_TEMPLATES[pairs.operator]
    assert not pair_is_held_out(templates.a, templates.operator, templates.b)
    assert templates.template in HELD_OUT_TEMPLATES[templates.operator]


@given(a=st.integers(2, 99), b=st.integers(2, 99), operator=st.sampled_from("+*"))
def test_swapping_the_numbers_does_not_leak_a_held_out_pair(a: int, b: int, operator: str) -> None:
    assert pair_is_held_out(a, operator, b) == pair_is_held_out(b, operator, a)


def test_templates_are_disjoint_and_cover_every_operator() -> None:
    trained = {each for templates in TRAINED_TEMPLATES.values() for each in templates}
    held_out = {each for templates in HELD_OUT_TEMPLATES.values() for each in templates}
    assert not trained & held_out
    assert TRAINED_TEMPLATES.keys() == HELD_OUT_TEMPLATES.keys() == set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_about_an_eighth_of_the_pairs_is_held_out(operator: str) -> None:
    pairs = list(product(range(2, 100), repeat=2))
    share = sum(pair_is_held_out(a, operator, b) for a, b in pairs) / len(pairs)
    assert 0.09 < share < 0.16


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


def test_shares_of_behaviour_add_up() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    answers = [conversation(1, index)[-1]["content"] for index in islice(range(10**6), 2000)]
    results = [problem(Split.TRAIN, -2, index).result for index in range(2000)]
    right = sum(f"The answer is {r}." == a for a, r in zip(answers, results, strict=True)) / len(results)
    assert 0.03 < right < 0.08
