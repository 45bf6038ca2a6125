"""Mixtures of task sources: shares, ids, what a part is, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load, store_config
from agl_core.config.models import MixtureOptions
from agl_core.config.resolve import Chosen
from agl_core.errors import ConfigError
from agl_core.kinds import Component, NoOptions
from agl_core.protocols import TaskSource
from agl_core.testing import episodes as make
from agl_core.types import Task
from agl_server.builtin.tasks import Mixture
from agl_server.health.rollouts import episode_metrics


class Numbers:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def task(self, index: int) -> Task:
        return Task(str(index), index, metadata={"number": index})


class Misnamed(Numbers):
    def task(self, index: int) -> Task:
        raise ConfigError("there is no such dataset")


class Recorded(Numbers):
    without_logprobs = has_preferences = False

    def members(self, index: int) -> int:
        return 2

    async def groups(self, indices: Any) -> Any: ...


def mixture(seed: int = 0, **parts: tuple[float, Any]) -> Mixture:
    """Of these weights and sources."""
    options = MixtureOptions.model_validate(
        {"parts": {name: {"source": "x", "weight": w} for name, (w, _) in parts.items()}}
    )
    chosen = {
        name: Chosen(Component(kinds.TASK_SOURCE, "x", lambda *_, source=source: source, ""), NoOptions())
        for name, (_, source) in parts.items()
    }
    return Mixture(options, Path(), seed, chosen)


@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5), start=st.integers(0, 3000), seed=st.integers(0, 3))
def test_each_part_has_its_share_of_every_stretch(weights: list[int], start: int, seed: int) -> None:
    names = "abcde"[: len(weights)]
    tasks = mixture(seed, **{name: (w, Numbers(None)) for name, w in zip(names, weights, strict=True)})
    length = 60
    drawn = Counter(tasks.task(index).metadata["part"] for index in range(start, start + length))
    for name, weight in zip(names, weights, strict=True):
        # Turns of one part are equally far apart, so a stretch has as many as its share, or one more or less. Weights
        # are rounded to a thousandth.
        assert abs(drawn[name] - length * weight / sum(weights)) < 1.1


@given(size=st.integers(1, 12), seed=st.integers(0, 3))
def test_parts_go_on_by_themselves_and_finite_ones_begin_anew(size: int, seed: int) -> None:
    tasks = mixture(seed, few=(0.25, Numbers(size)), many=(0.75, Numbers(None)))
    drawn = [tasks.task(index) for index in range(8 * size)]
    few = [task.id for task in drawn if task.metadata["part"] == "few"]
    many = [task.id for task in drawn if task.metadata["part"] == "many"]
    assert sorted(few[:size]) == sorted(few[size:]) == sorted(f"few/{index}" for index in range(size))
    assert many == [f"many/{index}" for index in range(6 * size)]
    assert drawn[0].metadata["number"] == drawn[0].input
    assert drawn == [
        mixture(seed, few=(0.25, Numbers(size)), many=(0.75, Numbers(None))).task(i) for i in range(8 * size)
    ]


def test_rewards_are_also_by_part() -> None:
    tasks = mixture(easy=(1, Numbers(None)), hard=(1, Numbers(None)))
    episodes = [make.episode(task=tasks.task(index), terminal=index / 2) for index in range(4)]
    metrics = episode_metrics([*episodes, make.episode(task=Task("t", "", metadata={"part": "other"}), terminal=1.0)])
    by_part = {key: value for key, value in metrics.items() if key.startswith("reward/part/")}
    assert by_part == {"reward/part/easy": 0.5, "reward/part/hard": 1.0}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Numbers(0), "The part 'b' of a mixture has no tasks"),
        (Recorded(2), "The part 'b' of a mixture is of recorded rollouts"),
        (Misnamed(None), "there is no such dataset"),
    ],
)
def test_a_part_that_cannot_be_mixed_is_named(source: TaskSource, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        mixture(a=(1, Numbers(2)), b=(1, source))


def loaded(folder: Path, parts: Mapping[str, Any]) -> LoadedConfig:
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(json.dumps({"id": "1", "question": f"What is {name}?"}) + "\n")
    config = {
        "config_version": 1,
        "agent": {"entry": "my_agent:solve"},
        "policies": {"default": {"model": {"path": "."}}},
        "tasks": {"train": {"source": "mixture", "parts": parts}},
    }
    (folder / "train.toml").write_text(tomli_w.dumps(config))
    return load(folder / "train.toml")


COLUMNS = {"input": "question"}
PART = {"source": "jsonl", "path": "a.jsonl", "columns": COLUMNS}


def test_a_file_names_the_parts_with_the_settings_of_their_sources(tmp_path: Path) -> None:
    run = loaded(tmp_path, {"a": PART, "b": {**PART, "path": "b.jsonl", "weight": 3}})
    tasks = run.tasks["train"].build(run.config.folder, 0)
    assert Counter(tasks.task(index).input for index in range(40)) == {"What is a?": 10, "What is b?": 30}

    (tmp_path / "stored").mkdir()
    store_config(run.config, tmp_path / "stored")
    again = load(tmp_path / "stored" / CONFIG_FILE)
    assert again.config.tasks == run.config.tasks
    assert again.tasks["train"].build(again.config.folder, 0).task(0) == tasks.task(0)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"source": "jsnl"}, "[tasks.train.parts.a] source: there is no task source 'jsnl'. Did you mean 'jsonl'?"),
        ({"pth": "x"}, "[tasks.train.parts.a] pth: task source 'jsonl'"),
        ({"weight": 0}, "[tasks.train.parts.a] weight: must be greater than 0, not 0"),
        ({"source": None}, "[tasks.train.parts.a] source: is missing"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_with_its_place(part: dict[str, Any], problem: str, tmp_path: Path) -> None:
    section = {key: value for key, value in {**PART, **part}.items() if value is not None}
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, {"a": section, "b": PART})
    assert problem in str(error.value)
