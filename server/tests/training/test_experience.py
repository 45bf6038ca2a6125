"""The groups that an update gets, their order, and the fate of late ones and those cut off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.builtin import identical
from agl_core.learning.batch import BatchPlan, PolicyCredit, StepBatches, make_batches, staleness
from agl_core.store import Record
from agl_core.types import CreditKind, DropReason, Rollout, TrainingRecord
from agl_server.health.rollouts import staleness_metrics
from agl_server.training.checkpoints import read_state

from .scripted_training import Bench, StuckError, episode, make_bench, transition


def planned(steps: int, groups: int, size: int = 2) -> list[list[str]]:
    """The rollouts of each step, as a loop that waits for every step trains on them."""
    return [
        [f"s{step + 1}-g{group}-m{member}" for group in range(groups) for member in range(size)]
        for step in range(steps)
    ]


def shuffling(bench: Bench, seed: int) -> None:
    """Let rollouts end in any order, the same for the same seed."""
    bench.collector.first = lambda rollout: random.Random(f"{seed}:{rollout.id}").random()


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 4), groups=st.integers(1, 3))
def test_without_staleness_each_step_trains_on_what_it_began_in_the_order_of_the_plan(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int, groups: int
) -> None:
    bench = make_bench(tmp_path_factory.mktemp("run"), steps=steps, groups_per_step=groups, checkpoint_every=100)
    shuffling(bench, seed)

    asyncio.run(bench.trainer.train())

    assert bench.trained == planned(steps, groups)
    assert [set(batch.version_N.tolist()) for batch in bench.engine.batches] == [{step} for step in range(steps)]
    assert bench.collector.begun == [id for step in planned(steps, groups) for id in step]
    assert bench.collector.most_groups == groups
    assert bench.metric("staleness/max") == bench.metric("groups/in_flight") == [0.0] * steps
    assert bench.metric("groups/carried_over") == [0.0] * steps


@pytest.mark.parametrize(
    ("bound", "trained", "replaced"),
    [
        (0, [[0, 1], [2, 3]], [[], []]),
        (1, [[0, 2], [3, 5]], [[1], [4]]),
        (9, [[0, 3], [6, 9]], [[1, 2], [4, 5, 7, 8]]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
async def test_groups_of_equal_returns_are_replaced_within_a_bound(
    tmp_path: Path, bound: int, trained: list[list[int]], replaced: list[list[int]], seed: int
) -> None:
    """Every third group has contrast. Numbers are positions in the plan, which names two groups for each step."""
    bench = make_bench(tmp_path, steps=2, refill=bound)
    shuffling(bench, seed)
    bench.collector.reward = lambda rollout: 1.0 if rollout.position % 3 else float(rollout.member)

    def rollouts(positions: list[int]) -> list[str]:
        return [f"s{position // 2 + 1}-g{position % 2}-m{member}" for position in positions for member in (0, 1)]

    await bench.trainer.train()

    assert bench.trained == [rollouts(positions) for positions in trained]
    assert bench.metric("groups/replaced") == [len(positions) for positions in replaced]
    for step, positions in enumerate(replaced, 1):
        line = bench.log.lines[step - 1]
        assert line.get("episodes_dropped/no_contrast", 0) == 2 * len(positions)
        assert line.get("dropped/no_contrast", 0) == 4 * len(positions)
        assert line["rollouts"] == 2 * (len(positions) + 2), "they were run"
        planned_later = rollouts([position for position in positions if position // 2 + 1 != step])
        assert {(await bench.store.rollout(id)).step for id in planned_later} <= {step}
    assert bench.trainer.state.groups_begun == sum(map(len, trained + replaced))
    assert bench.trainer.state.groups_unfinished == []


async def test_a_slow_rollout_holds_up_nobody_and_carries_over(tmp_path: Path) -> None:
    """The step of a rollout is written with what was made of it: after a kill the store says both or neither."""
    bench = make_bench(tmp_path, max_staleness=2)
    bench.collector.held = lambda rollout: rollout.id == "s1-g0-m1" and bench.engine.version < 2
    writes: list[tuple[Record, ...]] = []
    put = bench.store.put

    async def noted(*records: Record) -> None:
        writes.append(records)
        await put(*records)

    bench.store.put = noted  # type: ignore[method-assign]
    await bench.trainer.train()

    assert bench.trained == [
        ["s1-g1-m0", "s1-g1-m1", "s2-g0-m0", "s2-g0-m1"],
        ["s2-g1-m0", "s2-g1-m1", "s3-g0-m0", "s3-g0-m1"],
        ["s1-g0-m0", "s1-g0-m1", "s3-g1-m0", "s3-g1-m1"],
        ["s4-g0-m0", "s4-g0-m1", "s4-g1-m0", "s4-g1-m1"],
    ]
    assert bench.stale == set()
    assert bench.metric("staleness/max") == [0, 1, 2, 2]
    assert bench.metric("groups/carried_over") == [0, 2, 2, 2]
    assert bench.metric("groups/in_flight") == [4, 4, 2, 0]
    moved = [(record, write) for write in writes for record in write if isinstance(record, Rollout)]
    assert {rollout.id: rollout.step for rollout, _ in moved}.items() >= {"s1-g0-m0": 3, "s1-g0-m1": 3}.items()
    for rollout, write in moved:
        assert rollout.step in {r.step for r in write if isinstance(r, TrainingRecord) and r.rollout == rollout.id}


async def test_what_is_too_old_is_dropped_and_counted_and_recorded_with_its_step(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_staleness=1)
    bench.collector.held = lambda rollout: rollout.id == "s1-g0-m1" and bench.engine.version < 3

    await bench.trainer.train()

    # The first call of each was answered by version 0 and the last update begins with version 3.
    assert bench.stale == {"s1-g0-m0", "s1-g0-m1"}
    assert {id for step in bench.trained for id in step} == {id for s in planned(4, 2) for id in s} - bench.stale
    assert bench.log.lines[-1]["episodes_dropped/stale"] == 2
    assert bench.log.lines[-1]["dropped/stale"] == 4
    assert {(await bench.store.rollout(id)).step for id in bench.stale} == {4}
    assert bench.log.lines[-1]["reward/mean"] == 0.5, "what was dropped for its age was judged all the same"


@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 5),
    groups=st.integers(1, 3),
    staleness=st.integers(0, 4),
    beyond=st.integers(0, 4),
)
def test_every_group_is_drawn_once_and_never_more_are_in_flight_than_may_be(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int, groups: int, staleness: int, beyond: int
) -> None:
    in_flight = groups + (beyond if staleness else 0)
    bench = make_bench(
        tmp_path_factory.mktemp("run"),
        steps=steps,
        groups_per_step=groups,
        max_staleness=staleness,
        in_flight=in_flight,
        checkpoint_every=100,
    )
    shuffling(bench, seed)

    asyncio.run(bench.trainer.train())

    trained = [id for step in bench.trained for id in step]
    assert sorted([*trained, *bench.stale]) == sorted(id for step in planned(steps, groups) for id in step)
    assert sorted(bench.collector.begun) == sorted(set(bench.collector.begun))
    assert bench.collector.most_groups == min(in_flight, steps * groups)
    assert max(bench.metric("staleness/max"), default=0) <= steps
    assert bench.trainer.state.groups_unfinished == []


async def test_a_resumed_run_begins_again_what_was_in_flight_and_nothing_else(tmp_path: Path) -> None:
    def slow(rollout: Rollout) -> bool:
        return rollout.group.startswith(("s1-g0", "s3-g1"))

    killed = make_bench(tmp_path, steps=6, max_staleness=3)
    killed.collector.held = slow
    with pytest.raises(StuckError):
        await killed.trainer.train()
    saved = read_state(killed.trainer.checkpoints.latest())
    assert saved.groups_unfinished[:2] == [0, 5]
    assert len(killed.collector.cancelled) == 4

    resumed = make_bench(tmp_path, saved, restart=1, steps=6, max_staleness=3)
    await resumed.trainer.train()

    done = [id for bench in (killed, resumed) for step in bench.trained for id in step]
    assert sorted(id.replace("-r1", "") for id in done) == sorted(id for step in planned(6, 2) for id in step)
    assert resumed.collector.begun[:4] == ["s1-g0-r1-m0", "s1-g0-r1-m1", "s3-g1-r1-m0", "s3-g1-r1-m1"]
    assert resumed.trainer.state.step == 6


@pytest.mark.parametrize(
    ("versions", "now", "age"),
    [((5,), 5, 0), ((5, 3, 4), 5, 2), ((None, 4), 5, 1), ((None,), 5, 0), ((), 5, 0), ((0,), 9, 9)],
)
def test_an_episode_is_as_old_as_its_oldest_transition(versions: Sequence[int | None], now: int, age: int) -> None:
    assert staleness(episode(versions=versions), {"default": now}) == age
    critic = transition("r", 9, 6, "critic")
    mixed = replace(episode(versions=versions), transitions=(*episode(versions=versions).transitions, critic))
    assert staleness(mixed, {"default": now, "critic": 6 + 2}) == max(age, 2), "each by its own policy's versions"
    assert staleness(mixed, {"default": now}) == age
    metrics = staleness_metrics([mixed, episode(versions=(now,))], {"default": now})
    assert metrics == {"staleness/mean": age / 2, "staleness/max": age}


def test_those_left_of_a_group_are_compared_unless_they_are_too_few() -> None:
    def batches(*versions: int) -> StepBatches:
        members = [episode(f"m{i}", (7, version), terminal=float(i), member=i) for i, version in enumerate(versions)]
        return make_batches([members], plan, versions={"default": 7})

    credit = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}
    plan = BatchPlan(credit, min_group_size=2, max_staleness=2)

    prepared = batches(7, 4, 5)
    assert {key.rollout for key in prepared.batches["default"].keys} == {"m0", "m2"}
    assert prepared.batches["default"].rollout_N.tolist() == [0, 0, 1, 1]
    assert {(record.rollout, record.dropped) for record in prepared.dropped} == {("m1", DropReason.STALE)}
    too_few = batches(7, 4, 4)
    assert (too_few.batches, too_few.episodes_dropped) == ({}, {DropReason.STALE: 2, DropReason.GROUP_TOO_SMALL: 1})
    ended = episode("m0", (0,), dropped=DropReason.ENDING)
    assert plan.drop_reason(ended, {"default": 9}) is DropReason.ENDING, "another reason comes first"
