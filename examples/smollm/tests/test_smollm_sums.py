"""The questions: their form, their results, and what is held out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sums import Split, SumOptions, build

EXAMPLE = Path(__file__).parents[1]


def tasks(split: Split, seed: int = 0, **settings: Any) -> Any:
    return build(SumOptions(split=split, **settings), EXAMPLE, seed)


@pytest.mark.parametrize("split", Split)
def test_results_agree_with_python(split: Split) -> None:
    made = tasks(split)
    for index in range(100):
        task = made.task(index)
        asked = re.fullmatch(
            r"State the final answer to the following arithmetic problem: (\d( [+-] \d){1,2}) =", task.input["question"]
        )
        assert asked is not None
        assert str(eval(asked[1])) == task.metadata["result"]
        assert task.input.keys() == {"question"}


def test_training_never_asks_what_is_held_out() -> None:
    made = tasks(Split.EVAL)
    asked = {made.task(index).input["question"] for index in range(made.size)}
    assert made.size == len(asked) == 100
    assert [made.task(index).metadata["terms"] for index in range(4)] == [2, 3, 2, 3]
    for seed in range(3):
        training = tasks(Split.TRAIN, seed)
        assert training.size is None
        assert not asked & {training.task(index).input["question"] for index in range(2000)}
