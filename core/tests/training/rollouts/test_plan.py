"""Which rollouts a step makes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agl_core.server.gateway.gateway import call_seed
from agl_core.training.rollouts.plan import plan_groups, plan_train_group, train_index
from agl_core.types import Mode, Rollout, Task


@dataclass
class Numbers:
    size: int | None

    def task(self, index: int) -> Task:
        return Task(f"t{index}", index)


@given(size=st.integers(1, 30), epochs=st.integers(1, 10), seed=st.integers(0, 5))
def test_each_epoch_of_a_finite_source_visits_every_task_once(size: int, epochs: int, seed: int) -> None:
    source = Numbers(size)
    visited = [train_index(source, position, seed) for position in range(size * epochs)]
    for epoch in range(epochs):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_an_endless_source_never_repeats() -> None:
    assert [train_index(Numbers(None), position, 0) for position in range(20)] == list(range(20))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    source = Numbers(20)
    first, second = ([train_index(source, epoch * 20 + i, 0) for i in range(20)] for epoch in (0, 1))
    assert first != second
    assert [train_index(source, i, 1) for i in range(20)] != first


def train_group(position: int, restart: int = 0) -> list[Rollout]:
    return plan_train_group(Numbers(None), position, groups_per_step=3, size=2, seed=0, run="x", restart=restart)


def test_a_position_of_training_has_a_step_and_a_place_in_it() -> None:
    planned = [(group[0].group, {each.step for each in group}) for group in map(train_group, range(5))]
    assert planned == [("s1-g0", {1}), ("s1-g1", {1}), ("s1-g2", {1}), ("s2-g0", {2}), ("s2-g1", {2})]
    assert [each.id for each in train_group(3, restart=2)] == ["s2-g0-r2-m0", "s2-g0-r2-m1"]


def test_members_of_a_group_share_the_task_and_all_ids_are_unique() -> None:
    evaluated = [
        group
        for step in (0, 1)
        for restart in (0, 1)
        for mode in (Mode.EVAL_GREEDY, Mode.EVAL_SAMPLED)
        for split in ("eval", "other")
        for group in plan_groups(
            Numbers(None), [4, 4], run="x", restart=restart, step=step, mode=mode, split=split, position=0
        )
    ]
    trained = [train_group(position, restart) for position in range(6) for restart in (0, 1)]
    planned = [rollout for group in (*evaluated, *trained) for rollout in group]
    assert len({rollout.id for rollout in planned}) == len(planned) == 32 + 24
    groups: dict[str, set[str]] = {}
    for rollout in planned:
        groups.setdefault(rollout.group, set()).add(rollout.task.id)
    assert all(len(tasks) == 1 for tasks in groups.values())
    assert len(groups) == len(evaluated) + len(trained)


def test_a_held_out_task_has_the_split_of_its_set_unless_its_source_gives_it_one() -> None:
    class Named(Numbers):
        def task(self, index: int) -> Task:
            return Task(f"t{index}", index, "test")

    def splits(source: Numbers) -> set[str]:
        groups = plan_groups(
            source, [0, 1], run="x", restart=0, step=0, mode=Mode.EVAL_GREEDY, split="hard", position=0
        )
        return {rollout.task.split for group in groups for rollout in group}

    assert (splits(Numbers(None)), splits(Named(None))) == ({"hard"}, {"test"})


def seeds_of(restart: int) -> list[int]:
    """Of the first calls of two steps' training, four groups of one single task, and of an evaluation of it."""
    trained = [
        plan_train_group(Numbers(1), position, groups_per_step=4, size=3, seed=0, run="x", restart=restart)
        for position in range(8)
    ]
    evaluated = plan_groups(
        Numbers(1),
        [0, 0],
        run="x",
        restart=restart,
        step=1,
        mode=Mode.EVAL_SAMPLED,
        split="eval",
        position=0,
    )
    return [call_seed(0, rollout, 0, 0) for group in (*trained, *evaluated) for rollout in group]


def test_a_task_that_is_drawn_again_is_sampled_with_other_seeds_and_a_resumed_run_repeats_them() -> None:
    seeds = seeds_of(restart=0)
    assert len(set(seeds)) == len(seeds) == 8 * 3 + 2
    assert seeds_of(restart=1) == seeds
