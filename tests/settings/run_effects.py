"""Effects of what a run is and which parts it has: its name and folders, agent, tasks, sampling and plugins."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from agl_core import kinds
from agl_core.capture import attach
from agl_core.errors import ConfigError
from agl_core.training.server import new_run_dir

from .settings_bench import HERE, Bench, Effect, Given, Ran, ran


def refusal(bench: Bench, given: Given) -> str | None:
    """Whether the configuration is refused, and why."""
    try:
        bench.load(given)
    except ConfigError as error:
        return str(error).replace(str(bench.folder), "")
    return None


def run_folder(bench: Bench, given: Given) -> tuple[str, str]:
    """Where a new run goes: the folder above, and its own name without the number that makes it unique."""
    with contextlib.chdir(bench.folder):
        created = new_run_dir(bench.load(given))
    return created.parent.name, created.name.split("-")[0]


def train_tasks(bench: Bench, given: Given) -> list[str]:
    """The tasks to train on, by their ids and inputs."""
    loaded = bench.load(given)
    source = loaded.tasks["train"].build(loaded.folder, loaded.config.seed)
    return [f"{task.id}: {task.input}" for task in map(source.task, range(min(source.size or 3, 3)))]


def engines(bench: Bench, given: Given) -> list[str]:
    """The engines that can be chosen; our own is in a plugin file."""
    return sorted(bench.load(given).plugins.components(kinds.ENGINE))


async def endings_of_an_unaware_agent(bench: Bench, given: Given) -> set[str]:
    """How rollouts of an agent end that does not know where its calls should go."""
    attach([]).detach()
    try:
        return {str(attempt.ending) for attempt in (await bench.run(given)).attempts}
    finally:
        attach([]).detach()


def results(run: Ran) -> list[Any]:
    return [attempt.result for attempt in run.attempts]


def files(run: Ran) -> list[str]:
    return sorted(path.name.split(".tfevents")[0] for path in run.folder.rglob("*") if path.suffix != ".log")


def evaluated(run: Ran) -> set[tuple[str, int]]:
    """Each held-out set and how many tasks it has."""
    return {(entry["set"], entry["rollouts"]) for entry in run.summary.state.evaluations}


UNAWARE = {"agent.entry": "scripted_agent:solve_unaware"}

EFFECTS: Mapping[str, Effect] = {
    "config_version": Effect(refusal, {"config_version": 2}),
    "name": Effect(run_folder, {"name": "named"}),
    "runs": Effect(run_folder, {"runs": "elsewhere"}),
    "seed": Effect(ran(lambda run: run.requested("seed")), {"seed": 7}),
    "folder": Effect(train_tasks, {"folder": "below"}, {"plugins": [], "engine.name": "torch"}),
    "plugins": Effect(engines, {"plugins": []}, {"engine.name": "torch"}),
    "agent.entry": Effect(ran(results), {"agent.entry": "scripted_agent:solve_badly"}),
    "agent.command": Effect(ran(results), {"agent": {"command": [sys.executable, str(HERE / "scripted_agent.py")]}}),
    "agent.attach": Effect(endings_of_an_unaware_agent, {"agent.attach": True}, UNAWARE),
    "tasks": Effect(ran(evaluated), {"tasks.second": {"source": "jsonl", "path": "tasks.jsonl"}}),
    "tasks.NAME.source": Effect(train_tasks, {"tasks.train": {"source": "counting"}}),
    "sampling.temperature": Effect(ran(lambda run: run.requested("temperature")), {"sampling.temperature": 0.7}),
    "sampling.max_tokens": Effect(ran(lambda run: run.requested("max_tokens")), {"sampling.max_tokens": 32}),
    "rewards": Effect(ran(lambda run: run.summary.state.train_rewards), {"rewards": {"token_f1": {}}}),
    "engine.name": Effect(ran(lambda run: run.seen["engine"]), {"engine.name": "scripted-too"}),
    "store.name": Effect(ran(files), {"store.name": "another"}),
    "trackers": Effect(ran(files), {"trackers": {}}),
}
