"""Effects of the training loop's settings, of evaluation and of the workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_core.errors import TrainingError
from agl_core.learning import ScoringRule
from agl_core.plugins import Plugins
from agl_core.testing.memory_store import MemoryStore
from agl_core.training.metrics import Observer
from agl_core.training.rollouts import Collector, TrainingPlan
from agl_core.training.server import local_server, new_run_dir
from agl_core.training.session import open_session
from agl_core.types import Attempt, Ending, Rollout, RolloutState

from .policy_effects import rows_computed_together
from .settings_bench import Bench, Effect, Given, Ran, ran


class EndedQueue:
    """A rollout queue whose every rollout is done at once, with one ending."""

    def __init__(self, store: MemoryStore, ending: Ending) -> None:
        self._store, self._ending = store, ending
        self._done: dict[str, Rollout] = {}

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        await self._store.put(*(Attempt(each.id, 0, "w", 0.0, 1.0, self._ending) for each in rollouts))
        self._done |= {
            each.id: replace(each, state=RolloutState.DONE, ending=self._ending, counted_attempt=0) for each in rollouts
        }

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        return [self._done[id] for id in ids]

    async def cancel(self, ids: Collection[str]) -> None: ...


def episodes_that_ended(ending: Ending) -> Callable[[Bench, Given], Awaitable[Any]]:
    """What the trainer collects of rollouts with this ending: whether each is dropped, and its terminal reward."""

    async def observe(bench: Bench, given: Given) -> Any:
        loaded = bench.load(given)
        tasks = loaded.tasks["train"].build(loaded.folder, 0)
        groups = [TrainingPlan(tasks, "r", 0, seed=0, groups_per_step=1, group_size=1).group(0)]
        store = MemoryStore()
        collector = Collector(
            store,
            EndedQueue(store, ending),
            [ScoringRule("half", lambda episode: 0.5)],
            loaded.config.train.endings,
            Plugins().hook,
            lambda: None,
        )
        with Observer().phase("rollouts", 1) as phase:
            collected = await collector.collect(groups, phase)
        return [(episode.dropped, episode.terminal) for episode in collected.episodes]

    return observe


def groups_and_rollouts(run: Ran) -> list[tuple[int, int]]:
    """Of each update."""
    return [(len(set(update["group"])), len(set(update["rollout"]))) for update in run.updates]


def in_flight(run: Ran) -> float:
    """Groups that were under way while the first update was made."""
    found: float = run.metrics[1]["groups/in_flight"]
    return found


def replayed(run: Ran) -> list[list[tuple[float, float]]]:
    """By update, score and weight of each transition that an earlier version sampled."""
    return [
        [
            row
            for version, *row in zip(update["version"], update["scores"], update["weight"], strict=True)
            if version < made
        ]
        for made, update in enumerate(run.updates)
    ]


def kept(run: Ran) -> int:
    return run.summary.state.kept


async def steps_made(bench: Bench, given: Given) -> int | str:
    """How many, or why a run was stopped."""
    try:
        return len((await bench.run(given)).summary.state.train_rewards)
    except TrainingError as error:
        return str(error).partition(":")[0]


def checkpoints(run: Ran) -> tuple[list[str], list[str]]:
    """Those that were written, and those that are there at the end."""
    return run.seen["saved"], sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def evaluations(run: Ran) -> list[tuple[Any, ...]]:
    keys = ("step", "set", "mode", "rollouts")
    return [tuple(entry[key] for key in keys) for entry in run.summary.state.evaluations]


def most_at_once(run: Ran) -> int:
    """How many attempts of the first training step were under way at the same time."""
    steps = [attempt for attempt in run.attempts if attempt.rollout.startswith("s1-g")]
    return max(sum(other.started <= each.started < (other.ended or 0) for other in steps) for each in steps)


def endings(run: Ran) -> list[tuple[str, int, Ending | None]]:
    return sorted((attempt.rollout, attempt.attempt, attempt.ending) for attempt in run.attempts)


def processes(run: Ran) -> int:
    """How many different ones an agent found itself in."""
    return len({attempt.result for attempt in run.attempts})


async def has_a_worker(bench: Bench, given: Given) -> bool:
    """Whether a run runs rollouts itself."""
    loaded = bench.load(given)
    run_dir = new_run_dir(loaded)
    async with (
        local_server(loaded, run_dir) as server,
        open_session(loaded, run_dir, server, Observer()) as session,
    ):
        return session.worker is not None


def _of_endings() -> Iterator[tuple[str, Effect]]:
    for ending in Ending:
        change = {f"train.endings.{ending}": 0.25}
        yield f"train.endings.{ending}", Effect(episodes_that_ended(ending), change)


def _agent(function: str) -> Given:
    return {"agent.entry": f"scripted_agent:{function}", "train.steps": 1}


def _tasks(name: str) -> Given:
    return {"tasks.train.path": f"{name}.jsonl"}


REPLAY: Given = {
    **_tasks("unequal"),
    "train.steps": 6,
    "train.endings.crashed": 0.25,
    "async.max_staleness": 4,
    "async.in_flight": 2,  # As many as a step takes: the time that rollouts take does not matter.
    "algorithm.grpo.importance_cap": 2.0,
    "buffer.name": "prioritised",
}
"""Three tasks, whose groups' rewards lie 3/4, 1/4 and 0 apart, are trained on four times each, and again."""

EFFECTS: Mapping[str, Effect] = {
    "train.steps": Effect(ran(lambda run: len(run.updates)), {"train.steps": 1}),
    "train.groups_per_step": Effect(ran(groups_and_rollouts), {"train.groups_per_step": 1}),
    "train.group_size": Effect(ran(groups_and_rollouts), {"train.group_size": 3}),
    "train.min_group_size": Effect(
        ran(kept),
        {"train.min_group_size": 3},
        {**_tasks("fragile"), "train.group_size": 3, "train.endings.crashed": "drop"},
    ),
    "train.agents": Effect(ran(kept), {"train.agents": ["planner"]}),
    "train.patience": Effect(steps_made, {"train.patience": 2}, {"train.agents": ["planner"]}),
    "train.serving_gap": Effect(steps_made, {"train.serving_gap": 0.01}),
    "train.checkpoint_every": Effect(ran(checkpoints), {"train.checkpoint_every": 1}),
    "train.keep_checkpoints": Effect(ran(checkpoints), {"train.keep_checkpoints": 1}, {"train.checkpoint_every": 1}),
    "train.deterministic": Effect(rows_computed_together, {"train.deterministic": True}),
    **dict(_of_endings()),
    "async.max_staleness": Effect(ran(in_flight), {"async.max_staleness": 1}),
    "async.in_flight": Effect(ran(in_flight), {"async.in_flight": 3}, {"async.max_staleness": 1}),
    "buffer.prioritised.ratio": Effect(ran(replayed), {"buffer.prioritised.ratio": 0.5}, REPLAY),
    "buffer.prioritised.capacity": Effect(ran(replayed), {"buffer.prioritised.capacity": 1}, REPLAY),
    "buffer.name": Effect(ran(groups_and_rollouts), {"buffer.name": "half"}),
    "eval.every": Effect(ran(evaluations), {"eval.every": 1}),
    "eval.tasks": Effect(ran(evaluations), {"eval.tasks": 3}),
    "eval.modes": Effect(ran(evaluations), {"eval.modes": ["eval-sampled"]}),
    "workers.concurrency": Effect(ran(most_at_once), {"workers.concurrency": 1}),
    "workers.embedded": Effect(has_a_worker, {"workers.embedded": False}),
    "workers.isolation": Effect(ran(processes), {"workers.isolation": "process"}, _agent("solve_somewhere")),
    "workers.memory_mib": Effect(ran(endings), {"workers.memory_mib": 1024}, _agent("solve_big")),
    "workers.timeout": Effect(ran(endings), {"workers.timeout": 0.2}, {**_tasks("slow"), "train.steps": 1}),
    "workers.attempts": Effect(ran(endings), {"workers.attempts": 2}, _tasks("restarting")),
}
