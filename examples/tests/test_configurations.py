"""Every example as a run sees it: its file holds, its tasks hide the answer, and its reward is the right one."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.config.check import cautions
from agl_core.config.load import LoadedConfig, load
from agl_core.learning.rewards import ScoringRule, score
from agl_core.testing import episodes
from agl_core.types import Ending, Episode, Mode, Task

EXAMPLES = Path(__file__).parents[1]
FILES = [str(path.parent.relative_to(EXAMPLES)) for path in sorted(EXAMPLES.glob("**/train.toml"))]
MADE_POLICY = f"policies.default.model.path={EXAMPLES / 'calc' / 'policy'}"
"""In the place of SmolLM2, which is not in the repository."""
ENDLESS = ["beds", "calc", "math", "smollm", "smollm/calculator", "smollm/prompts", "sql", "trip"]
"""Whose training set is made as it is needed, anew for each seed."""


def loaded(example: str, *overrides: str, file: str = "train.toml") -> LoadedConfig:
    policy = [MADE_POLICY] if example.startswith("smollm") else []
    return load(EXAMPLES / example / file, [*policy, *overrides])


def tasks(example: str, name: str, seed: int = 0, *overrides: str) -> Any:
    config = loaded(example, *overrides)
    return config.tasks[name].build(config.config.folder, seed)


@pytest.mark.parametrize("example", FILES)
def test_the_parts_go_together(example: str) -> None:
    config = loaded(example)
    assert list(cautions(config)) == []
    assert (Path(config.weights("default")) / "config.json").is_file()
    module, _, function = (config.config.agent.entry or "").partition(":")
    assert not module or f"async def {function}(" in (EXAMPLES / example / f"{module}.py").read_text()


@pytest.mark.parametrize("example", FILES)
def test_tasks_are_repeatable_differ_hide_the_answer_and_suffice_for_the_evaluation(example: str) -> None:
    config = loaded(example)
    for name, chosen in config.tasks.items():
        source = chosen.build(config.config.folder, 0)
        assert (source.size is None) is (name == "train" and example in ENDLESS)
        assert name == "train" or source.size >= min(config.config.eval.tasks, 50)
        tasks, again, others = (
            [of_seed.task(index) for index in range(min(50, of_seed.size or 50))]
            for of_seed in (source, *(chosen.build(config.config.folder, seed) for seed in (0, 1)))
        )
        assert tasks == again
        assert (tasks == others) is (source.size is not None)
        assert len({task.id for task in tasks}) == len(tasks)
        assert not any(task.input.keys() & {"result", "answer", "answers", "sql"} for task in tasks)


@pytest.mark.parametrize("example", ["calc", "math", "trip"])
def test_demonstrations_ask_what_training_asks_of_another_seed_and_are_mostly_wrong(example: str) -> None:
    conversation = importlib.import_module(f"make_{example}").conversation
    source, right = tasks(example, "train", seed=-1), 0
    for index in range(500):
        task, messages = source.task(index), conversation(0, index)
        assert messages[1]["content"] == task.input["question"]
        right += re.findall(r"\d+", messages[-1]["content"] or "")[-1:] == [task.metadata["result"]]
    assert 0 < right < 100


async def rewarded(config: LoadedConfig, episode: Episode) -> Episode:
    """The episode with the rewards of the file."""
    rules = [
        ScoringRule(n, chosen.build(config.config), config.config.rewards[n].weight)
        for n, chosen in config.rewards.items()
    ]
    scored, errors = await score(episode, rules, {Ending.FINISHED: "score"})
    assert not errors
    return scored


def finished(task: Task, result: str | None) -> Episode:
    return Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=result)


@pytest.mark.parametrize("example", ["calc", "math", "smollm", "smollm/calculator", "smollm/prompts", "trip"])
async def test_the_reward_is_one_for_the_right_last_number(example: str) -> None:
    config, task = loaded(example), tasks(example, "eval").task(0)
    right = int(task.metadata["result"])
    for result, reward in {f"The answer is {right}.": 1, f"{right} or {right + 1}": 0, "I do not know.": 0}.items():
        assert (await rewarded(config, finished(task, result))).terminal == reward


async def test_the_reward_of_sql_is_the_rows_of_the_query() -> None:
    config, task = loaded("sql"), tasks("sql", "eval").task(0)
    assert task.metadata.keys() == {"sql", "database", "difficulty"}
    right = task.metadata["sql"]
    for query, reward in {right: 1, right.replace("SELECT", "select"): 1, "SELECT 1 WHERE 0": 0, "No idea": 0}.items():
        assert (await rewarded(config, finished(task, query))).terminal == reward


@pytest.mark.parametrize(
    ("result", "correct", "form"),
    [
        ("Answer: Sao Tome", 1.0, 1.0),
        ("Answer: the São Tomé.", 1.0, 1.0),
        ("Answer: Sao Luis", 0.5, 1.0),
        ("It is Sao Tome. Answer:", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("searches", [0, 3])
async def test_the_reward_of_rag_is_mostly_correctness_a_little_form_and_the_price_of_searches(
    result: str | None, correct: float, form: float, searches: int
) -> None:
    task = Task("1", {"question": "…"}, metadata={"answers": ["Sao Tome", "São Tomé"]})
    calls = [episodes.transition(turn, episodes.tool_result(f"t{turn}")) for turn in range(searches)]
    episode = replace(episodes.episode(*calls, task=task), result=result)
    scored = await rewarded(loaded("rag"), episode)
    assert scored.terminal == pytest.approx(0.9 * correct + 0.1 * form - 0.02 * searches)


@pytest.mark.parametrize("bed", ["errand", "walk"])
def test_every_bed_is_a_run(bed: str) -> None:
    loaded("beds", f"tasks.train.bed={bed}", f"tasks.eval.bed={bed}")


@pytest.mark.usefixtures("agl_verl_is_installed")
@pytest.mark.parametrize(
    "example", [str(path.parent.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/cluster.toml")]
)
def test_the_cluster_trains_the_same_agents_with_the_same_rewards(example: str) -> None:
    cluster, laptop = loaded(example, file="cluster.toml"), loaded(example)
    assert cluster.config.engine.name == "verl"
    assert cluster.config.agent == laptop.config.agent
    assert cluster.config.rewards.keys() == laptop.config.rewards.keys()
    assert cluster.config.train.agents == laptop.config.train.agents


def test_prompts_and_weights_are_of_the_same_agent_tasks_and_rewards() -> None:
    optimized, trained = loaded("smollm/prompts", file="optimize.toml"), loaded("smollm/prompts")
    for part in ("agent", "tasks", "rewards", "sampling"):
        assert getattr(optimized.config, part) == getattr(trained.config, part)
    assert optimized.config.prompts.keys() == trained.config.prompts.keys()


@pytest.mark.parametrize("play", ["learning", "without", "inverted", "unseen"])
def test_each_play_of_real_use_is_a_run(play: str) -> None:
    from play import PLAYS

    loaded("online", *PLAYS[play].settings)


def test_the_gate_of_real_use_sees_both_kinds_of_wishes_and_training_only_the_old_one() -> None:
    seen = loaded("online").config.eval.tasks
    for name in ("train", "eval", "eval_airline"):
        source = tasks("online", name)
        questions = [source.task(index).input["question"] for index in range(min(source.size, seen))]
        assert {" with " in question for question in questions} == {name == "eval_airline"}
        assert len(set(questions)) == len(questions)
