"""The tasks that a curriculum draws: chances by success, what is learned of groups, resuming, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.config.models import CurriculumSection
from agl_core.errors import ConfigError
from agl_core.testing import episodes as make
from agl_core.training.checkpoints import RunState, read_state
from agl_core.training.plan import CANDIDATES, Curriculum, chances, train_index
from agl_core.types import Ending, Episode, Rollout, Task

from .scripted_training import Bench, make_bench

SUCCESS = st.lists(st.floats(0, 1), min_size=1, max_size=20)
SETTINGS = st.builds(
    lambda bounds, explore: CurriculumSection(low=min(bounds), high=max(bounds), explore=explore),
    st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.7, 0.95, 1.0]), min_size=2, max_size=2, unique=True),
    st.floats(0, 1),
)


@dataclass
class Levels:
    """Tasks of three levels in turn."""

    size: int | None

    def task(self, index: int) -> Task:
        return Task(f"t{index}", index, metadata={"level": index % 3})


@given(success=SUCCESS, settings=SETTINGS)
def test_chances_are_in_proportion_to_learnability_beside_a_share_for_all(
    success: list[float], settings: CurriculumSection
) -> None:
    drawn = chances(success, settings)
    floor = settings.explore / len(success)
    usable = [settings.low <= p <= settings.high and 0 < p < 1 for p in success]
    assert sum(drawn) == pytest.approx(1)
    if not any(usable):
        assert drawn == pytest.approx([1 / len(success)] * len(success))
        return
    assert all(chance >= floor * (1 - 1e-9) for chance in drawn)
    for p, chance, is_usable in zip(success, drawn, usable, strict=True):
        if not is_usable:
            assert chance == pytest.approx(floor)
        best = max((q for q, other in zip(success, usable, strict=True) if other), key=lambda q: q * (1 - q))
        of_best = drawn[success.index(best)]
        if is_usable:
            assert (chance - floor) * best * (1 - best) == pytest.approx((of_best - floor) * p * (1 - p), abs=1e-9)


def test_draws_follow_the_chances() -> None:
    success = {f"t{index}": p for index, p in enumerate([0.0, 0.1, 0.5, 0.9, 1.0])}
    curriculum = Curriculum(CurriculumSection(explore=0.25), Levels(5), 0, success)
    draws = Counter(curriculum.draw(position) for position in range(5, 20_005))
    expected = [0.05, 0.05 + 0.75 * 9 / 43, 0.05 + 0.75 * 25 / 43, 0.05 + 0.75 * 9 / 43, 0.05]
    assert [draws[index] / 20_000 for index in range(5)] == pytest.approx(expected, abs=0.015)


def test_every_task_is_tried_once_before_success_counts() -> None:
    curriculum = Curriculum(CurriculumSection(explore=0), Levels(9), 3, {"t4": 0.5})
    assert [curriculum.draw(position) for position in range(9)] == [train_index(Levels(9), n, 3) for n in range(9)]
    success = {f"t{index}": 1.0 for index in range(9) if index != 2}
    curriculum = Curriculum(CurriculumSection(explore=0), Levels(9), 3, success)
    assert {curriculum.draw(position) for position in range(9, 20)} == {2}, "the one of which nothing is known"


@given(seed=st.integers(0, 9), position=st.integers(0, 1000))
def test_of_an_endless_source_each_draw_has_the_next_tasks_to_choose_from(seed: int, position: int) -> None:
    settings = CurriculumSection(by="level", explore=0)
    index = Curriculum(settings, Levels(None), seed, {"0": 0.0, "1": 0.5, "2": 1.0}).draw(position)
    assert index in range(position * CANDIDATES, (position + 1) * CANDIDATES)
    assert index % 3 == 1, "only this level teaches anything"


def group(task: Task, *rewards: float | None) -> list[Episode]:
    return [make.episode(group=task.id, task=task, terminal=reward) for reward in rewards]


def test_success_is_a_mean_of_groups_of_which_the_latest_counts_most() -> None:
    settings = CurriculumSection(reward=(-1, 3), low=0.2, high=0.8)
    curriculum = Curriculum(settings, Levels(3), 0, {})
    first, second, third = map(Levels(3).task, range(3))
    metrics = curriculum.learn([*group(first, 1.0, 3.0), *group(second, None, None), *group(third, 0.0, 9.0)])
    assert curriculum.success == {"t0": 0.75, "t1": 0.0, "t2": 1.0}, "without rewards a group has failed"
    assert metrics == {"curriculum/success": pytest.approx(1.75 / 3), "curriculum/set_aside": 2}
    curriculum.learn(group(first, -1.0, None, float("nan")))
    assert 0 < curriculum.success["t0"] < 0.75
    for _ in range(30):
        curriculum.learn(group(first, 1.0, 3.0))
    assert curriculum.success["t0"] == pytest.approx(0.75)


def test_tasks_of_a_level_share_their_success() -> None:
    curriculum = Curriculum(CurriculumSection(by="level"), Levels(6), 0, {})
    curriculum.learn(group(Levels(6).task(5), 0.0, 1.0))
    assert curriculum.success == {"2": 0.5}


class Recorded(Levels):
    without_logprobs = False

    def members(self, index: int) -> int:
        return 2

    async def recorded(self, wanted: Any) -> Any: ...


@pytest.mark.parametrize(
    ("settings", "source", "problem"),
    [
        ({}, Levels(None), r"\[tasks.train\] makes new tasks without end.* curriculum.by"),
        ({"by": "levle"}, Levels(3), r"task t0 have no 'levle'. Did you mean 'level'"),
        ({}, Recorded(3), "were recorded.*Leave .curriculum. out"),
        ({"low": 0.5, "high": 0.5}, Levels(3), "low and high: 0.5 to 0.5 is no range"),
        ({"reward": (1, 0)}, Levels(3), "reward: 1 to 0 is no range"),
    ],
)
def test_what_cannot_be_drawn_by_success_is_refused(settings: Any, source: Levels, problem: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        Curriculum(CurriculumSection(**settings), source, 0, {})


def run(folder: Path, state: RunState | None = None, **settings: Any) -> tuple[Bench, dict[int, str]]:
    """A run of six tasks that succeed 0, 1, … 5 times out of five; with the task at each position of it."""
    restart = {} if state is None else {"restart": 1, "state": state}
    settings = {"curriculum": {"explore": 0.3}, "steps": 12, **settings}
    bench = make_bench(folder, tasks=Levels(6), **settings, **restart)
    drawn: dict[int, str] = {}

    def reward(rollout: Rollout) -> float:
        drawn[rollout.position] = rollout.task.id
        rng = random.Random(f"{rollout.task.id} {rollout.position} {rollout.member}")
        return float(rng.random() < int(rollout.task.id[1:]) / 5)

    bench.collector.reward = reward
    bench.collector.ending = lambda rollout: Ending.LOST if rollout.position == 4 else Ending.FINISHED
    asyncio.run(bench.trainer.train())
    return bench, drawn


def test_fewer_groups_are_without_contrast_where_tasks_stay_as_difficult_as_they_are(tmp_path: Path) -> None:
    by_success, _ = run(tmp_path / "by_success", steps=100, group_size=8, checkpoint_every=100, curriculum={})
    in_turn, _ = run(tmp_path / "in_turn", steps=100, group_size=8, checkpoint_every=100, curriculum=None)
    assert np.mean(in_turn.metric("groups/no_contrast")) == pytest.approx(0.395, abs=0.05), "all equal: p⁸ + (1 - p)⁸"
    assert np.mean(by_success.metric("groups/no_contrast")) < 0.2


@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_resumed_run_draws_as_one_that_was_not_interrupted(step: int, tmp_path: Path) -> None:
    whole, drawn = run(tmp_path)
    state = read_state(whole.trainer.checkpoints.path(step))
    assert len(drawn) == 12 * 2
    resumed, again = run(tmp_path / "resumed", state)
    assert again == {position: task for position, task in drawn.items() if position >= 2 * step}
    assert resumed.trainer.state.success == whole.trainer.state.success
    assert resumed.metric("curriculum/success") == whole.metric("curriculum/success")[step:]


def test_groups_that_were_replaced_or_are_under_way_are_known_once_they_are_trained_on(tmp_path: Path) -> None:
    bench, drawn = run(tmp_path, refill=2, max_staleness=2)
    state = bench.trainer.state
    known = {task for position, task in drawn.items() if position not in state.groups_unfinished}
    assert state.success.keys() == known
    assert sum(bench.metric("groups/replaced")) > 0
