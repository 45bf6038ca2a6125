"""The example as a run sees it: its files, its plugins, its reward and its credit; and the loader of Calc-X."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core import kinds
from agl_core.config.check import cautions, check
from agl_core.config.load import load
from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.types import Ending, Episode, Mode, Task

EXAMPLE = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "data" / "calc_x.jsonl"


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig.model_validate(tomllib.loads((EXAMPLE / "train.toml").read_text()))


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load([EXAMPLE / "math_tasks.py", EXAMPLE.parent / "calc_x.py"])


def source(plugins: Plugins, name: str, settings: dict[str, Any], seed: int = 0) -> Any:
    component = plugins.component(kinds.TASK_SOURCE, name, "[tasks]")
    return component.build(component.options.model_validate(settings), EXAMPLE, seed)


def test_the_run_goes_together_and_air_is_on() -> None:
    loaded = load(EXAMPLE / "train.toml")
    check(loaded)
    assert list(cautions(loaded)) == []
    assert loaded.config.credit.name == "air"


def test_air_credit_and_tool_results_as_rewards_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="tool_results"):
        check(load(EXAMPLE / "train.toml", ["rewards.tool_results.default_weight=0.2"]))


@pytest.mark.usefixtures("agl_verl_is_installed")
def test_the_cluster_run_goes_together() -> None:
    loaded = load(EXAMPLE / "cluster.toml")
    check(loaded)
    assert list(cautions(loaded)) == []
    assert loaded.config.engine.name == "verl"
    places = loaded.config.engine.settings["max_rows"] * loaded.config.engine.settings["gpus_per_node"]
    assert loaded.config.train.groups_per_step * loaded.config.train.group_size <= places


def test_every_set_of_the_file_is_made(config: RunConfig, plugins: Plugins) -> None:
    sizes = {name: source(plugins, s.source, s.settings).size for name, s in config.tasks.items()}
    assert sizes == {"train": None, "eval": 100, "eval_steps": 100, "eval_phrases": 100}


def test_tasks_hide_the_result_from_the_agent(plugins: Plugins) -> None:
    task = source(plugins, "math", {"split": "eval_steps"}).task(3)
    assert task.input.keys() == {"question"}
    assert task.metadata.keys() == {"result"}


def test_training_depends_on_the_seed_and_the_held_out_sets_do_not(plugins: Plugins) -> None:
    def first(split: str, seed: int) -> list[Task]:
        made = source(plugins, "math", {"split": split}, seed)
        return [made.task(index) for index in range(50)]

    assert first("train", 1) != first("train", 2)
    assert first("eval_phrases", 1) == first("eval_phrases", 2)
    assert len({task.id for task in first("train", 1)}) == 50


def test_an_unknown_split_is_refused(plugins: Plugins) -> None:
    with pytest.raises(ValidationError, match="split"):
        source(plugins, "math", {"split": "test"})


def test_the_reward_is_one_for_the_right_answer_alone(config: RunConfig, plugins: Plugins) -> None:
    section = config.rewards["answer"]
    component = plugins.component(kinds.REWARD, section.rule or "answer", "[rewards.answer]")
    rule = component.build(component.options.model_validate(section.settings))
    task = source(plugins, "math", {"split": "eval_numbers"}).task(0)
    right = task.metadata["result"]

    def rewarded(result: str) -> Any:
        return rule(Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=result))

    assert rewarded(f"The answer is {right}.") == 1.0
    assert rewarded(f"The answer is {int(right) + 1}.") == 0.0
    assert rewarded("I did not find the answer.") == 0.0


def test_calc_x_is_read_in_its_own_format(plugins: Plugins) -> None:
    """A number, a fraction, an option's letter, and a subset without ids and `result_float`."""
    made = source(plugins, "calc-x", {"path": str(ROWS)})
    tasks = [made.task(index) for index in range(made.size)]
    assert [task.metadata["result"] for task in tasks] == ["66", "0.375", "12", "3000"]
    assert [task.id for task in tasks] == ["gsm8k__a1", "ape210k__b2", "math_qa__c3", "3"]
    assert all(task.input.keys() == {"question"} for task in tasks)


def test_calc_x_is_read_as_it_is_published(plugins: Plugins, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    made, same = (source(plugins, "calc-x", {"path": str(path)}) for path in (tmp_path / "train.parquet", ROWS))
    assert made == same


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"question": "2+3?"}', "row 0: has no 'result'"),
        ('{"question": "2+3?", "result": "B"}', "row 0: the result 'B' is no number"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_row_in_another_format_is_named(plugins: Plugins, tmp_path: Path, row: str, error: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=error):
        source(plugins, "calc-x", {"path": str(tmp_path / "rows.jsonl")})


def test_the_agent_entry_and_the_policy_are_there(config: RunConfig) -> None:
    module, _, function = config.agent.entry.partition(":")
    assert f"async def {function}(" in (EXAMPLE / f"{module}.py").read_text()
    assert (EXAMPLE / config.policies["default"].model.path / "config.json").is_file()
