"""The questions: their form, their results, and what is held out."""

from __future__ import annotations

import re

import pytest
from sums import Split, sums

QUESTION = re.compile(r"State the final answer to the following arithmetic problem: (\d( [+-] \d){1,2}) =")


def questions(split: Split, count: int, seed: int = 0) -> set[str]:
    return {sums(index, seed, split=split).input["question"] for index in range(count)}


@pytest.mark.parametrize("split", Split)
def test_results_agree_with_python(split: Split) -> None:
    for index in range(100):
        task = sums(index, 0, split=split)
        asked = QUESTION.fullmatch(task.input["question"])
        assert asked is not None
        assert str(eval(asked[1])) == task.metadata["result"]
        assert task.input.keys() == {"question"}


def test_training_never_asks_what_is_held_out() -> None:
    held_out = questions(Split.EVAL, 100)
    assert len(held_out) == 100
    assert [sums(index, 0, split=Split.EVAL).metadata["terms"] for index in range(4)] == [2, 3, 2, 3]
    for seed in range(3):
        assert not held_out & questions(Split.TRAIN, 2000, seed)
