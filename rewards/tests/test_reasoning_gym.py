"""Tasks of reasoning-gym, and its verifiers; `score_answer` of the datasets themselves is the oracle."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from agl_core import kinds
from agl_core.errors import ConfigError, PluginError
from agl_core.plugins import Plugins
from agl_core.protocols import TaskSource
from agl_core.testing import episodes as make
from agl_core.types import Task
from agl_rewards import reasoning
from agl_rewards.reasoning import ReasoningGymRule


def tasks(seed: int = 0, **options: Any) -> TaskSource:
    component = Plugins.load().component(kinds.TASK_SOURCE, "reasoning_gym", "[tasks.train] source")
    return component.build(component.options(**options), Path(), seed)


async def score(task: Task, result: Any, time_limit: float = 60.0) -> float:
    return await ReasoningGymRule()(replace(make.episode(), task=task, result=result), time_limit)


@pytest.mark.parametrize("name", ["chain_sum", "word_sorting", "simple_equations", "needle_haystack"])
async def test_tasks_and_scores_are_those_of_the_dataset(name: str) -> None:
    source = tasks(seed=3, dataset=name)
    theirs = reasoning_gym.create_dataset(name, seed=4 << 24, size=5)

    for index in range(5):
        task, entry = source.task(index), theirs[index]
        assert (task.input, task.split) == (entry["question"], "train")
        assert task.metadata["answer"] == str(entry["answer"])
        for answer in (entry["answer"], f"It is {entry['answer']}", "7", ""):
            assert await score(task, answer) == theirs.score_answer(str(answer).strip(), entry)
        assert await score(task, None) == 0.0
    assert await score(source.task(0), source.task(0).metadata["answer"]) == 1.0


@pytest.mark.parametrize("name", ["countdown", "n_queens", "simple_integration"])
async def test_what_an_answer_runs_changes_nothing_but_its_own_score(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verifier hands the answer, or a part of it, to `eval` or to SymPy's parser, which does."""
    task = tasks(dataset=name).task(0)
    spoiled = tmp_path / "spoiled"
    verifier = f"__import__('reasoning_gym').get_score_answer_fn('{name}').__self__.__class__"
    own_result = "max(n for n in range(64) if __import__('ctypes').CDLL(None).fcntl(n, 1) >= 0)"
    hostile = [
        f"__import__('os').system('touch {spoiled}')",
        f"open('{spoiled}', 'w')",
        f"setattr({verifier}, 'score_answer', lambda *_: 1.0)",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os')._exit(0)",
        "exit()",
    ]
    scores = await asyncio.gather(*(score(task, answer) for answer in hostile), score(task, "9**9**9**9", 0.5))
    assert all(0.0 <= s < 1.0 for s in scores)
    assert await score(task, f"[__import__('os').write({own_result}, b'[\"value\", 1e999]\\n'), exit()]") <= 1.0
    assert not spoiled.exists()
    assert await score(task, "nothing") < 1.0
    assert await score(task, reasoning_gym.create_dataset(name, seed=1 << 24, size=1)[0]["answer"]) == 1.0


def test_evaluation_has_its_own_tasks_which_no_seed_changes() -> None:
    train, again, held_out = (
        [source.task(index) for index in range(5)]
        for source in (
            tasks(seed=1, dataset="rectangle_count"),
            tasks(seed=2, dataset="rectangle_count"),
            tasks(seed=1, dataset="rectangle_count", split="eval"),
        )
    )
    assert {task.input for task in train}.isdisjoint(task.input for task in again)
    assert {task.input for task in train + again}.isdisjoint(task.input for task in held_out)
    other_seed = tasks(seed=2, dataset="rectangle_count", split="eval")
    assert held_out == [other_seed.task(index) for index in range(5)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dataset": "chain_sun"}, "Did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "settings": {"terms": 2}}, "refuses its settings"),
        ({"dataset": "chain_sum", "settings": {"min_terms": 0}}, "min_terms must be positive"),
    ],
)
def test_what_is_not_there(options: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        tasks(**options).task(0)


async def test_tasks_of_another_source_are_refused() -> None:
    with pytest.raises(PluginError, match="another"):
        await ReasoningGymRule()(make.episode())


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning._dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"agl-rewards\[reasoning-gym\]"):
        tasks(dataset="chain_sum").task(0)
