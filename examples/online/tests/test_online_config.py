"""The example as agl sees it: its file, and its plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
from desk import TOOLS

from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, load

EXAMPLE = Path(__file__).parents[1]


def loaded(*overrides: str) -> LoadedConfig:
    return load(EXAMPLE / "train.toml", overrides, None)


def test_the_parts_go_together() -> None:
    config = loaded()
    check(config)
    assert (Path(config.weights["default"]) / "config.json").is_file()
    assert TOOLS[0]["function"]["name"] == "search"


def test_the_gate_sees_both_kinds_of_wishes_and_tasks_only_the_old_one() -> None:
    config = loaded()
    sets = {name: chosen.build(config.folder, 0) for name, chosen in config.tasks.items()}
    seen = {name: min(found.size or 0, config.config.eval.tasks) for name, found in sets.items()}
    questions = {name: [found.task(i).input["question"] for i in range(seen[name])] for name, found in sets.items()}
    assert not any(" with " in each for each in [*questions["train"], *questions["eval"]])
    assert all(" with " in each for each in questions["eval_airline"])
    assert {name: len(set(each)) for name, each in questions.items()} == {"train": 56, "eval": 56, "eval_airline": 112}


@pytest.mark.parametrize("play", ["learning", "without", "inverted", "unseen"])
def test_each_play_has_a_configuration_that_holds(play: str) -> None:
    from play import PLAYS

    check(loaded(*PLAYS[play].settings))
