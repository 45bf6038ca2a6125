"""The example as a run sees it: its files, its tasks and its reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core import kinds
from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, load
from agl_core.learning import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.types import Ending, Episode, Mode, Task

EXAMPLE = Path(__file__).parents[1]
VERL = EXAMPLE.parents[1] / "algorithms" / "verl" / "agl_verl" / "plugin.py"


@pytest.fixture(scope="module")
def config() -> LoadedConfig:
    return load(EXAMPLE / "train.toml", (), None)


def tasks(config: LoadedConfig, name: str, seed: int = 0) -> Any:
    return config.tasks[name].build(config.folder, seed)


def test_the_sets(config: LoadedConfig) -> None:
    check(config)
    assert tasks(config, "train").size is None
    assert tasks(config, "eval").size >= config.config.eval.tasks


def test_tasks_hide_the_query_from_the_agent(config: LoadedConfig) -> None:
    task = tasks(config, "eval").task(3)
    assert task.input.keys() == {"question", "database"}
    assert task.metadata.keys() == {"sql", "database", "difficulty"}


def test_training_depends_on_the_seed_and_the_held_out_set_does_not(config: LoadedConfig) -> None:
    def first(name: str, seed: int) -> list[Task]:
        return [tasks(config, name, seed).task(index) for index in range(30)]

    assert first("train", 1) != first("train", 2)
    assert first("eval", 1) == first("eval", 2)
    assert len({task.id for task in first("train", 1)}) == 30


def test_an_unknown_split_is_refused() -> None:
    component = Plugins.load([EXAMPLE / "sql_tasks.py"]).component(kinds.TASK_SOURCE, "sql", "[tasks]")
    with pytest.raises(ValidationError, match="split"):
        component.options.model_validate({"split": "test"})


async def test_the_reward_is_the_rows_of_the_query(config: LoadedConfig) -> None:
    task = tasks(config, "eval").task(0)
    rules = [ScoringRule(n, chosen.build(), config.config.rewards[n].weight) for n, chosen in config.rewards.items()]
    episode = Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, ())

    async def rewarded(query: str) -> float | None:
        scored, errors = await score(replace(episode, result=query), rules, {Ending.FINISHED: "score"})
        assert not errors
        return scored.terminal

    assert await rewarded(task.metadata["sql"]) == 1.0
    assert await rewarded(task.metadata["sql"].replace("  ", " ").replace("SELECT", "select")) == 1.0
    assert await rewarded("SELECT 1 WHERE 0") == 0.0
    assert await rewarded("I do not know") == 0.0


def test_writer_and_rewriter_are_trained_and_the_checker_is_not(config: LoadedConfig) -> None:
    assert config.config.train.agents == ("writer", "rewriter")


def test_the_cluster_differs_in_model_data_and_engine_alone(config: LoadedConfig) -> None:
    """veRL need not be installed for the check; a dry run on a machine that has it shows what it would start."""
    cluster = load(EXAMPLE / "cluster.toml", [f'plugins=["sql_tasks.py", "{VERL}"]'], None)
    check(cluster)
    assert cluster.config.engine.name == "verl"
    assert cluster.config.policies["default"].model.path == "meta-llama/Llama-3.2-3B-Instruct"
    assert cluster.config.agent == config.config.agent
    assert cluster.config.train.agents == config.config.train.agents
    assert {name: section.source for name, section in cluster.config.tasks.items()} == {
        "train": "spider",
        "eval": "spider",
    }
