"""The example as a run sees it: its files, its plugin and its rewards."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, load
from agl_core.errors import ConfigError
from agl_core.learning import ScoringRule, score
from agl_core.testing import episodes
from agl_core.types import Ending, Episode, Mode, Task, Transition

EXAMPLE = Path(__file__).parents[1]
VERL = EXAMPLE.parents[1] / "algorithms" / "verl"


def loaded(*overrides: str) -> LoadedConfig:
    return load(EXAMPLE / "train.toml", overrides, None)


@pytest.fixture(scope="module")
def config() -> LoadedConfig:
    return loaded()


def tasks(config: LoadedConfig, name: str) -> Any:
    return config.tasks[name].build(config.folder, 0)


def test_the_sets(config: LoadedConfig) -> None:
    assert tasks(config, "train").size > 1000
    assert tasks(config, "eval").size == config.config.eval.tasks == 200


def test_the_agent_is_given_the_question_alone(config: LoadedConfig) -> None:
    task, train = tasks(config, "eval").task(3), tasks(config, "train")
    assert task.input.keys() == {"question"}
    assert task.metadata.keys() == {"answers", "hops"}
    assert len({train.task(index).id for index in range(train.size)}) == train.size


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        tasks(loaded("tasks.train.path=nowhere.jsonl"), "train")


@pytest.mark.parametrize(
    ("said", "correct", "form"),
    [
        ("Answer: Sao Tome", 1.0, 1.0),
        ("Answer: São Tomé", 1.0, 1.0),
        ("Answer: the Sao Tome.", 1.0, 1.0),
        ("Answer: Sao Luis", 0.5, 1.0),
        ("Answer: Oslo", 0.0, 1.0),
        ("Sao Tome", 0.0, 0.0),
        ("It is Sao Tome. Answer:", 0.0, 0.0),
        ("I did not find the answer.", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
async def test_the_reward_is_mostly_correctness_and_a_little_form(
    config: LoadedConfig, said: str | None, correct: float, form: float
) -> None:
    task = Task("1", {"question": "…"}, metadata={"answers": ["Sao Tome", "São Tomé"]})
    episode = Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=said)
    scored = await rewarded(config, episode)
    assert scored.terminal == pytest.approx(0.9 * correct + 0.1 * form)
    assert {reward.name: reward.value for reward in scored.rewards} == {
        "correctness": correct, "format": form, "searches": 0.0
    }  # fmt: skip


async def test_each_search_costs_a_little(config: LoadedConfig) -> None:
    task = Task("1", {"question": "…"}, metadata={"answers": ["Oslo"]})
    first, *others = (episodes.tool_result(id) for id in "abc")
    calls = (episodes.transition(0, first), episodes.transition(1, *others))

    async def reward(*transitions: Transition) -> float | None:
        return (await rewarded(config, episodes.episode(*transitions, task=task, result="Answer: Oslo"))).terminal

    assert await reward() == pytest.approx(1.0)
    assert await reward(*calls) == pytest.approx(1.0 - 3 * 0.02)


async def rewarded(config: LoadedConfig, episode: Episode) -> Episode:
    """With the rewards of `train.toml`."""
    rules = [ScoringRule(n, chosen.build(), config.config.rewards[n].weight) for n, chosen in config.rewards.items()]
    scored, errors = await score(episode, rules, {Ending.FINISHED: "score"})
    assert not errors
    return scored


@pytest.mark.parametrize("credit", ["identical", "discounted", "stepwise", "air"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce++"])
def test_one_line_changes_the_rule_of_credit_or_the_algorithm(credit: str, algorithm: str) -> None:
    check(loaded(f"credit.name={credit}", f"algorithm.name={algorithm}"))


@pytest.fixture
def verl_is_installed(tmp_path: Path) -> Iterator[None]:
    """agl-verl's entry points are found; veRL, Ray and vLLM are not there."""
    project = tomllib.loads((VERL / "pyproject.toml").read_text())["project"]
    installed = tmp_path / f"agl_verl-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agl-verl\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"]["agl"].items())
    (installed / "entry_points.txt").write_text(f"[agl]\n{points}")
    with pytest.MonkeyPatch.context() as patch:
        for folder in (VERL, tmp_path):
            patch.syspath_prepend(folder)
        yield


@pytest.mark.usefixtures("verl_is_installed")
def test_the_cluster_trains_the_same_agent_with_the_same_rewards() -> None:
    cluster = load(EXAMPLE / "cluster.toml", (), None)
    check(cluster)
    laptop = loaded().config
    assert cluster.config.agent == laptop.agent
    assert cluster.config.rewards == laptop.rewards
    assert cluster.config.plugins == laptop.plugins
