"""The rollouts that a run makes; each who waits for some of them gets its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore

from agl_core.config.models import EvalSection
from agl_core.errors import EngineError, PluginError, StoreError
from agl_core.learning.rewards import ScoringRule
from agl_core.plugins import Plugins
from agl_core.protocols import GroupRewardRule, train_index
from agl_core.testing import episodes as make
from agl_core.types import (
    AlarmName,
    Attempt,
    AttemptKey,
    DropReason,
    Ending,
    Episode,
    Mode,
    Rollout,
    RolloutState,
)
from agl_core.wire import Activity
from agl_server.gateway.calls import call_seed
from agl_server.health.alarms import StallWatch
from agl_server.training.evaluation import Evaluator
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import Collector, TrainingPlan

from .scripted_training import Numbers


class ScriptedQueue:
    """Rollouts are done when a test says so; those that are cancelled are done at once."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self._done: dict[str, Rollout] = {}
        self._changed = asyncio.Event()

    def finish(self, *ids: str, ending: Ending = Ending.FINISHED, mode: Mode = Mode.TRAIN) -> None:
        for id in ids:
            self._done[id] = make.rollout(id, state=RolloutState.DONE, ending=ending, counted_attempt=0, mode=mode)
        self._changed.set()
        self._changed = asyncio.Event()

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: a test says what is done."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        while not (finished := [rollout for id, rollout in self._done.items() if id in ids]):
            await self._changed.wait()
        return finished

    async def cancel(self, ids: Collection[str]) -> None:
        self.cancelled += ids
        self.finish(*ids, ending=Ending.CANCELLED)


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def plan(source: Numbers, restart: int = 0, groups: int = 3, size: int = 2, seed: int = 0) -> TrainingPlan:
    return TrainingPlan(source, "x", restart, seed, groups_per_step=groups, group_size=size)


def evaluation(count: int, restart: int = 0, step: int = 0) -> list[list[Rollout]]:
    """The groups of two held-out sets in both modes."""
    sets = dict.fromkeys(("eval", "other"), Numbers())
    evaluator = Evaluator(None, sets, EvalSection(tasks=count), "x", restart, Observer())  # type: ignore[arg-type]
    modes = (Mode.EVAL_GREEDY, Mode.EVAL_SAMPLED)
    return [group for split in sets for mode in modes for group in evaluator.planned(step, split, mode)]


@given(size=st.integers(1, 30), epochs=st.integers(1, 10), seed=st.integers(0, 5))
def test_each_epoch_of_a_finite_source_visits_every_task_once_in_its_own_order(
    size: int, epochs: int, seed: int
) -> None:
    visited = [train_index(Numbers(size), position, seed) for position in range(size * epochs)]
    orders = [visited[epoch * size : (epoch + 1) * size] for epoch in range(epochs)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({*map(tuple, orders)}) == epochs or size < 20
    assert [train_index(Numbers(), position, seed) for position in range(20)] == list(range(20))


def test_ids_and_seeds_of_rollouts_are_unique_and_a_resumed_run_repeats_the_seeds() -> None:
    groups = [plan(Numbers()).group(position) for position in range(5)]
    steps = [(group[0].group, {rollout.step for rollout in group}) for group in groups]
    assert steps == [("s1-g0", {1}), ("s1-g1", {1}), ("s1-g2", {1}), ("s2-g0", {2}), ("s2-g1", {2})]
    again = plan(Numbers(), restart=2).group(3)
    assert [rollout.id for rollout in again] == ["s2-g0-r2-m0", "s2-g0-r2-m1"]

    every = [*groups, again, *evaluation(2, step=0), *evaluation(2, restart=1, step=1)]
    ids = [rollout.id for group in every for rollout in group]
    assert len(set(ids)) == len(ids) == 2 * 6 + 2 * 8
    assert all(len({rollout.task.id for rollout in group}) == 1 for group in every)
    splits = {(rollout.task.id, rollout.task.split) for [rollout] in evaluation(2)}
    assert splits == {("t0", "test"), ("t1", "eval"), ("t1", "other")}, "unless its source gives it one"

    def seeds(restart: int) -> list[int]:
        """The seeds of first calls: of two steps of training, four groups of one single task, and of its evaluation."""
        trained = [plan(Numbers(1), restart, groups=4, size=3).group(position) for position in range(8)]
        sets = {"eval": Numbers(1)}
        evaluator = Evaluator(None, sets, EvalSection(), "x", restart, Observer())  # type: ignore[arg-type]
        evaluated = evaluator.planned(1, "eval", Mode.EVAL_SAMPLED, repeat=2)
        return [call_seed(0, rollout, 0, 0) for group in (*trained, *evaluated) for rollout in group]

    assert len(set(seeds(0))) == 8 * 3 + 2
    assert seeds(0) == seeds(1)


def collecting(
    queue: ScriptedQueue,
    store: MemoryStore,
    rule: object = lambda episode: 0.5,
    check: Callable[[], None] = lambda: None,
) -> Collector:
    endings = dict.fromkeys(Ending, "score")
    return Collector(store, queue, [ScoringRule("half", rule)], endings, Plugins().hook, check)  # type: ignore[arg-type]


async def collect(collector: Collector, *groups: list[Rollout]) -> list[Episode]:
    """The episodes of these groups, as a step or an evaluation gets them."""
    with Observer().phase("rollouts", 1) as phase:
        return await collector.collect(groups, phase)


async def recorded(store: MemoryStore, *ids: str) -> list[Rollout]:
    rollouts = [make.rollout(id) for id in ids]
    await store.put(*rollouts, *(Attempt(id, 0, "w", 0.0, 1.0, Ending.FINISHED) for id in ids))
    return rollouts


async def test_training_rollouts_that_end_during_an_evaluation_wait_for_training() -> None:
    queue, store = ScriptedQueue(), MemoryStore()
    collector = collecting(queue, store)
    trained, evaluated = await recorded(store, "t0", "t1"), await recorded(store, "e0", "e1")
    await queue.enqueue(trained)
    evaluation = asyncio.create_task(collect(collector, *([rollout] for rollout in evaluated)))
    await settle()
    queue.finish("t0", "e1", "t1", "e0")

    assert [episode.rollout for episode in await evaluation] == ["e0", "e1"]
    scored = await collector.finished({"t0", "t1"})
    assert [(outcome.rollout.id, outcome.episode.terminal) for outcome in scored] == [("t0", 0.5), ("t1", 0.5)]


async def test_a_dead_part_of_the_run_is_told_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise EngineError("the worker is gone")

    monkeypatch.setattr("agl_server.training.rollouts.HEALTH_INTERVAL", 0.01)
    with pytest.raises(EngineError, match="is gone"):
        await collecting(ScriptedQueue(), MemoryStore(), check=check).finished({"a"})
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "somebody is left waiting"


async def test_a_wait_that_is_too_long_is_told_again_and_again_and_goes_on() -> None:
    lines = list[str]()
    idle = Activity(queued=2, running=0, waiting=0, finished=None, serving=True, attempts=[])
    watch = StallWatch(0.05, lambda: idle, MemoryStore(), lines.append)
    assert await watch.watched(asyncio.sleep(0.2, "done")) == "done"
    assert await watch.watched(asyncio.sleep(0.06, 4), "which makes an update") == 4
    assert ["no worker runs a rollout, and 2 wait" in line for line in lines] == [True, True, False]
    assert "the trainer waits for the engine, which makes an update" in lines[2]
    assert [alarm.text for alarm in watch.take()] == lines
    assert watch.take() == []


async def test_a_wait_for_workers_that_wait_for_the_store_ends_with_what_the_store_says() -> None:
    idle = Activity(queued=1, running=0, waiting=0, finished=None, serving=True, attempts=[])
    store, ends = MemoryStore(), asyncio.Event()
    waiting = asyncio.create_task(StallWatch(0.05, lambda: idle, store).watched(ends.wait()))
    await asyncio.sleep(0)
    store.failure = StoreError("the disk is full")
    with pytest.raises(StoreError, match="the disk is full"):
        await waiting
    assert await StallWatch(0.05, lambda: idle, store).watched(asyncio.sleep(0.1, "of earlier")) == "of earlier"


class BlockedQueue(ScriptedQueue):
    """Its process, which is that of the gateway too, stands still while rollouts are awaited."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        time.sleep(0.2)  # noqa: ASYNC251
        return await super().done(ids)


async def test_rollouts_that_a_standstill_of_the_gateway_cost_their_time_are_dropped_without_a_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agl_server.training.rollouts.HEALTH_INTERVAL", 0.01)
    queue, store, lines = BlockedQueue(), MemoryStore(), list[str]()
    now = time.time()
    ends = {"held": (now, Ending.TIMED_OUT), "earlier": (now - 60, Ending.TIMED_OUT), "well": (now, Ending.FINISHED)}
    planned = await recorded(store, *ends)
    await store.put(*(Attempt(id, 0, "w", at - 1, at + 0.2, ending) for id, (at, ending) in ends.items()))
    watch = StallWatch(0.05, None, store, lines.append)
    collector = Collector(
        store, queue, [ScoringRule("half", lambda episode: 0.5)], {}, Plugins().hook, lambda: None, watch
    )  # type: ignore[arg-type]
    await queue.enqueue(planned)
    for id, (_, ending) in ends.items():
        queue.finish(id, ending=ending)

    outcomes = {done.rollout.id: done.episode for done in await collector.finished(set(ends))}

    assert (outcomes["held"].dropped, outcomes["held"].rewards, outcomes["held"].terminal) == (
        DropReason.STALLED,
        (),
        None,
    )
    assert [(outcomes[id].dropped, outcomes[id].terminal) for id in ("earlier", "well")] == [(None, 0.5)] * 2
    assert [alarm.name for alarm in watch.take()] == [AlarmName.STALL]
    assert "1 rollouts that did not finish are dropped: the machine kept them waiting (held)" in lines


async def test_rollouts_that_time_out_while_no_engine_answers_are_kept_waiting() -> None:
    store = MemoryStore()
    silent = Activity(queued=0, running=1, waiting=0, finished=None, serving=False, attempts=[])
    watch = StallWatch(0.05, lambda: silent, store, list[str]().append)
    [planned] = await recorded(store, "r")
    await store.put(Attempt("r", 0, "w", time.time(), time.time() + 1, Ending.TIMED_OUT))
    rollout = replace(planned, counted_attempt=0, ending=Ending.TIMED_OUT)
    assert await watch.kept_waiting([rollout]) == set()
    await watch.watched(asyncio.sleep(0.1))
    assert await watch.kept_waiting([rollout]) == {"r"}
    assert await watch.kept_waiting([replace(rollout, ending=Ending.FINISHED)]) == set()


async def test_a_collection_that_is_cut_off_cancels_what_is_still_out() -> None:
    queue, store = ScriptedQueue(), MemoryStore()
    rollouts = await recorded(store, "a", "b")
    collection = asyncio.create_task(collect(collecting(queue, store), rollouts))
    await settle()
    queue.finish("a")
    await settle()
    collection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collection
    assert queue.cancelled == ["b"]


async def test_a_rule_that_fails_on_every_rollout_ends_the_run_and_on_some_drops_them() -> None:
    def fragile(episode: Episode) -> float:
        if episode.rollout in failing:
            raise ValueError("no such answer")
        return 1.0

    queue, store = ScriptedQueue(), MemoryStore()
    rollouts = await recorded(store, "a", "b")
    for failing in ({"a"}, {"a", "b"}):
        queue.finish("a", "b")
        collector = collecting(queue, store, fragile)
        collection = collect(collector, [replace(rollout) for rollout in rollouts])
        if len(failing) == 2:
            with pytest.raises(PluginError, match="no such answer"):
                await collection
        else:
            episodes = await collection
            assert [episode.terminal for episode in episodes] == [None, 1.0]
            first, second = await store.attempts("a", "b")
            assert str(first.error).startswith(
                "The reward rule 'half' failed on rollout a. ValueError: no such answer ("
            )
            assert (str(first.error).count("\n"), second.error) == (0, None)
            [alarm] = collector.stall.take()
            assert alarm.name is AlarmName.REWARD_FAILED
            assert alarm.seen == f"reward rules failed 1 times; 1 of 2 rollouts were dropped. {first.error}"


async def test_a_rule_that_compares_waits_for_the_whole_group_and_its_rewards_are_stored() -> None:
    seen: list[list[str]] = []

    def compare(episodes: Sequence[Episode]) -> list[float]:
        seen.append([episode.rollout for episode in episodes])
        return [float(index) for index, _ in enumerate(episodes)]

    queue, store = ScriptedQueue(), MemoryStore()
    rollouts = await recorded(store, "a", "b")
    collection = asyncio.create_task(collect(collecting(queue, store, GroupRewardRule(compare)), rollouts))
    await settle()
    queue.finish("b")
    await settle()
    assert seen == []
    queue.finish("a")

    assert [episode.terminal for episode in await collection] == [0.0, 1.0]
    assert seen == [["a", "b"]]
    stored = await store.rewards([AttemptKey("a", 0), AttemptKey("b", 0)])
    assert [(r.rollout, r.value, r.source) for r in stored] == [("a", 0.0, "half"), ("b", 1.0, "half")]


async def test_groups_are_compared_at_the_same_time_and_rollouts_of_an_evaluation_are_groups_of_one() -> None:
    """Also where it repeats a task."""
    everyone = threading.Barrier(3)

    async def compare(episodes: Sequence[Episode]) -> list[float]:
        await asyncio.to_thread(everyone.wait, 30)
        return [float(len(episodes))]

    queue, store = ScriptedQueue(), MemoryStore()
    rollouts = await recorded(store, "a", "b", "c")
    queue.finish("a", "b", "c", mode=Mode.EVAL_SAMPLED)
    collected = await collect(collecting(queue, store, GroupRewardRule(compare)), *([one] for one in rollouts))
    assert [(episode.rollout, episode.terminal) for episode in collected] == [("a", 1.0), ("b", 1.0), ("c", 1.0)]
