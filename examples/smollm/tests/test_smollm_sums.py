"""The questions: their form, their results, and what is held out; and the runs that ask them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sums import Split, SumOptions, build, every_sum, held_out

from agl_core import kinds
from agl_core.config.check import cautions, check
from agl_core.config.load import load
from agl_core.config.models import RunConfig
from agl_core.plugins import Plugins
from agl_core.types import Ending, Episode, Mode

EXAMPLE = Path(__file__).parents[1]
FILES = [EXAMPLE / "train.toml", EXAMPLE / "calculator" / "train.toml"]
MODEL = f"policies.default.model.path={EXAMPLE.parent / 'calc' / 'policy'}"
"""In the place of SmolLM2, which is made on each machine anew."""


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


def test_there_is_each_sum_once() -> None:
    assert len(set(every_sum(2))) == len(every_sum(2)) == 200
    assert len(set(every_sum(3))) == len(every_sum(3)) == 4000


def test_training_never_asks_what_is_held_out() -> None:
    made = tasks(Split.EVAL)
    asked = {made.task(index).input["question"] for index in range(made.size)}
    assert made.size == len(asked) == 100
    assert [made.task(index).metadata["terms"] for index in range(4)] == [2, 3, 2, 3]
    for seed in range(3):
        training = tasks(Split.TRAIN, seed)
        assert training.size is None
        assert not asked & {training.task(index).input["question"] for index in range(2000)}


def test_training_depends_on_the_seed_and_the_held_out_set_does_not() -> None:
    def first(split: Split, seed: int) -> list[str]:
        return [tasks(split, seed).task(index).input["question"] for index in range(50)]

    assert first(Split.TRAIN, 1) != first(Split.TRAIN, 2)
    assert first(Split.EVAL, 1) == first(Split.EVAL, 2)


def test_sums_of_one_length() -> None:
    made = tasks(Split.EVAL, least_terms=3)
    assert {made.task(index).metadata["terms"] for index in range(made.size)} == {3}
    assert made.size == len(held_out(3))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValidationError, match="split"):
        SumOptions.model_validate({"split": "test"})


@pytest.mark.parametrize("file", FILES)
def test_the_run_goes_together(file: Path) -> None:
    loaded = load(file, [MODEL])
    check(loaded)
    assert list(cautions(loaded)) == []
    module, _, function = loaded.config.agent.entry.partition(":")  # type: ignore[union-attr]
    assert f"async def {function}(" in (file.parent / f"{module}.py").read_text()


@pytest.mark.parametrize("file", FILES)
def test_the_reward_is_one_for_the_right_last_number(file: Path) -> None:
    config = RunConfig.model_validate(tomllib.loads(file.read_text()))
    section = config.rewards["answer"]
    component = Plugins.load([EXAMPLE / "sums.py"]).component(
        kinds.REWARD, section.rule or "answer", "[rewards.answer]"
    )
    rule = component.build(component.options.model_validate(section.settings))
    task = tasks(Split.EVAL).task(0)
    right = task.metadata["result"]

    def rewarded(result: str) -> Any:
        return rule(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=result))

    assert rewarded(f"4 + 8 = {right}.") == 1.0
    assert rewarded(f"{right} is more than {int(right) + 1}") == 0.0
    assert rewarded("") == 0.0
