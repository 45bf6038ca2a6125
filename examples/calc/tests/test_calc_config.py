"""The example as a run sees it: its file, its plugin and its reward."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core import kinds
from agl_core.config.models import RunConfig
from agl_core.plugins import Plugins
from agl_core.types import Ending, Episode, Mode, Task

EXAMPLE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig.model_validate(tomllib.loads((EXAMPLE / "train.toml").read_text()))


@pytest.fixture(scope="module")
def plugins(config: RunConfig) -> Plugins:
    return Plugins.load([EXAMPLE / file for file in config.plugins])


def source(plugins: Plugins, settings: dict[str, Any], seed: int = 0) -> Any:
    component = plugins.component(kinds.TASK_SOURCE, "calc", "[tasks]")
    return component.build(component.options.model_validate(settings), EXAMPLE, seed)


def test_every_set_of_the_file_is_made(config: RunConfig, plugins: Plugins) -> None:
    sizes = {name: source(plugins, section.settings).size for name, section in config.tasks.items()}
    assert sizes == {"train": None, "eval": 200, "eval_templates": 200}
    assert all(section.source == "calc" for section in config.tasks.values())
    assert config.eval.tasks <= 200


def test_tasks_hide_the_result_from_the_agent(plugins: Plugins) -> None:
    task = source(plugins, {"split": "eval"}).task(3)
    assert task.input.keys() == {"question"}
    assert task.metadata.keys() == {"result"}
    assert task == source(plugins, {"split": "eval"}).task(3)


def test_training_depends_on_the_seed_and_the_held_out_sets_do_not(plugins: Plugins) -> None:
    def first(split: str, seed: int) -> list[Task]:
        made = source(plugins, {"split": split}, seed)
        return [made.task(index) for index in range(50)]

    assert first("train", 1) != first("train", 2)
    assert first("eval", 1) == first("eval", 2)
    assert first("eval_templates", 1) == first("eval_templates", 2)
    assert len({task.id for task in first("train", 1)}) == 50


def test_an_unknown_split_is_refused(plugins: Plugins) -> None:
    with pytest.raises(ValidationError, match="split"):
        source(plugins, {"split": "test"})


def test_the_reward_is_one_for_the_right_answer_alone(config: RunConfig, plugins: Plugins) -> None:
    section = config.rewards["answer"]
    component = plugins.component(kinds.REWARD, section.rule or "answer", "[rewards.answer]")
    rule = component.build(component.options.model_validate(section.settings))
    task = source(plugins, {"split": "eval"}).task(0)
    right = task.metadata["result"]

    def rewarded(result: str) -> Any:
        return rule(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=result))

    assert rewarded(f"The answer is {right}.") == 1.0
    assert rewarded(f"The answer is {int(right) + 1}.") == 0.0
    assert rewarded("I did not find the answer.") == 0.0


def test_the_agent_entry_and_the_policy_are_there(config: RunConfig) -> None:
    module, _, function = config.agent.entry.partition(":")
    assert f"async def {function}(" in (EXAMPLE / f"{module}.py").read_text()
    assert (EXAMPLE / config.policies["default"].model.path / "config.json").is_file()
