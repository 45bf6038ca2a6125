"""Token F1 as SQuAD defines it."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_rewards import token_f1, word_f1

WORDS = st.lists(st.sampled_from(["cat", "sat", "mat", "dog"]), max_size=6).map(" ".join)


def test_docstring_examples_run() -> None:
    tool_result = doctest.testmod(importlib.import_module("agl_rewards.f1"))
    assert tool_result.attempted >= 3
    assert tool_result.failed == 0


@given(found=WORDS, expected=WORDS)
def test_it_is_symmetric_and_one_only_for_the_same_words(found: str, expected: str) -> None:
    value = word_f1(found, expected)
    assert value == word_f1(expected, found)
    assert 0 <= value <= 1
    assert (value == 1) == (sorted(found.split()) == sorted(expected.split()))


@pytest.mark.parametrize(
    ("found", "expected", "value"),
    [
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("", "", 1.0),
        (" ", "", 1.0),
        ("the", "", 0.0),
        ("", "The", 0.0),
        ("the", "The", 1.0),
        ("A", "B", 0.0),
        ("B", "A", 0.0),
        ("an", "A", 0.0),
        ("A.", "A", 1.0),
        ("", "?!", 0.0),
        ("!", "?", 0.0),
        ("?", "?", 1.0),
        ("U.S.", "us", 1.0),
        ("Zürich", "zürich", 1.0),
    ],
)
def test_examples(found: str, expected: str, value: float) -> None:
    assert word_f1(found, expected) == pytest.approx(value)


def test_the_best_of_several_answers_counts_and_the_field_is_chosen(make: Any) -> None:
    metadata = {"answers": ["dog", "cat", "a big cat"], "result": "dog"}
    assert token_f1(make.episode(result="big cat", metadata=metadata), field="answers") == 1.0
    assert token_f1(make.episode(result="big cat", metadata=metadata)) == 0.0
    assert token_f1(make.episode(result=None, metadata=metadata)) == 0.0
    assert token_f1(make.episode(result=["dog"], metadata=metadata)) == 1.0
