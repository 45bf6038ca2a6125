"""The example as a run sees it: its file, its plugin, its rewards, and the rules of credit it is meant to compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from behaviours import ask_airline, search_everywhere
from trips import Split, traveller, trip

from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, load
from agl_core.learning import ScoringRule, score
from agl_core.types import Ending, Episode, Task

EXAMPLE = Path(__file__).parents[1]
NAME = traveller(Split.TRAIN, 0, 0)
TRIP = trip(NAME)


def loaded(*overrides: str) -> LoadedConfig:
    return load(EXAMPLE / "train.toml", overrides, None)


@pytest.fixture(scope="module")
def config() -> LoadedConfig:
    return loaded()


def tasks(config: LoadedConfig, name: str, seed: int = 0) -> Any:
    return config.tasks[name].build(config.folder, seed)


def test_the_sets(config: LoadedConfig) -> None:
    assert tasks(config, "train").size is None
    assert tasks(config, "eval").size >= config.config.eval.tasks


def test_the_agent_is_given_the_question_and_the_traveller_alone(config: LoadedConfig) -> None:
    task = tasks(config, "eval").task(3)
    assert task.input == {"question": trip(task.input["traveller"]).question, "traveller": "eval/0/3"}
    assert task.metadata == {"result": trip("eval/0/3").result}


def test_training_depends_on_the_seed_and_the_held_out_set_does_not(config: LoadedConfig) -> None:
    def first(name: str, seed: int) -> list[Task]:
        return [tasks(config, name, seed).task(index) for index in range(50)]

    assert first("train", 1) != first("train", 2)
    assert first("eval", 1) == first("eval", 2)
    assert len({task.id for task in first("train", 1)}) == 50


async def rewarded(config: LoadedConfig, episode: Episode, result: str) -> Episode:
    task = Task("1", episode.task.input, metadata={"result": TRIP.result})
    rules = [ScoringRule(n, chosen.build(), config.config.rewards[n].weight) for n, chosen in config.rewards.items()]
    scored, errors = await score(replace(episode, task=task, result=result), rules, {Ending.FINISHED: "score"})
    assert not errors
    return scored


@pytest.mark.parametrize(("said", "terminal"), [(f"You pay {TRIP.result}.", 1.0), ("You pay 0.", 0.0), ("No.", 0.0)])
@pytest.mark.parametrize(("choice", "share"), [(ask_airline, 1.0), (search_everywhere, 0.0)])
async def test_the_reward_is_the_answer_and_memory_first_is_told_beside_it(
    config: LoadedConfig, played: Any, said: str, terminal: float, choice: Any, share: float
) -> None:
    episode = await rewarded(config, played(NAME, TRIP, choice, lambda trip, _: said), said)
    assert episode.terminal == terminal
    assert {reward.name: reward.value for reward in episode.rewards} == {"answer": terminal, "memory_first": share}


@pytest.mark.parametrize("credit", ["identical", "discounted", "stepwise", "air"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce++"])
def test_one_line_changes_the_rule_of_credit_or_the_algorithm(credit: str, algorithm: str) -> None:
    check(loaded(f"credit.name={credit}", f"algorithm.name={algorithm}"))


def test_the_policy_is_there(config: LoadedConfig) -> None:
    assert (Path(config.weights["default"]) / "config.json").is_file()
