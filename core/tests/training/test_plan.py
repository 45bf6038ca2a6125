"""Which rollouts a step makes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agl_core.training.plan import plan_groups, train_indices
from agl_core.types import Mode, Task


@dataclass
class Numbers:
    size: int | None

    def task(self, index: int) -> Task:
        return Task(f"t{index}", index)


@given(size=st.integers(1, 30), groups=st.integers(1, 10), seed=st.integers(0, 5))
def test_each_epoch_of_a_finite_source_visits_every_task_once(size: int, groups: int, seed: int) -> None:
    source = Numbers(size)
    visited = [i for step in range(1, size + 1) for i in train_indices(source, step, groups, seed)]
    for epoch in range(groups):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_an_endless_source_never_repeats() -> None:
    visited = [i for step in range(1, 6) for i in train_indices(Numbers(None), step, 4, 0)]
    assert visited == list(range(20))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    source = Numbers(20)
    first, second = (train_indices(source, step, 20, 0) for step in (1, 2))
    assert first != second
    assert train_indices(source, 1, 20, 1) != first


def test_members_of_a_group_share_the_task_and_all_ids_are_unique() -> None:
    planned = [
        rollout
        for step in (0, 1)
        for incarnation in (0, 1)
        for mode in Mode
        for split in ("train", "eval")
        for group in plan_groups(
            Numbers(None), [4, 4], run="x", incarnation=incarnation, step=step, mode=mode, split=split, size=3
        )
        for rollout in group
    ]
    trained = [r for r in planned if not (r.mode.trains and r.id.count("eval"))]
    by_id = {r.id for r in trained if not r.mode.trains}
    assert len(by_id) == len([r for r in trained if not r.mode.trains])
    groups: dict[str, set[str]] = {}
    for rollout in planned:
        groups.setdefault(rollout.group, set()).add(rollout.task.id)
    assert all(len(tasks) == 1 for tasks in groups.values())
