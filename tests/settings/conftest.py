"""The parts of the tables of effects: an effect, and the bench on which it is observed."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import tomli_w

from agl_core.config.load import LoadedConfig, load
from agl_core.types import Attempt
from agl_server.server import LightningServer
from agl_server.training.metrics import Observer, Summary
from agl_server.training.run import local_server, new_run_dir, train
from agl_server.training.session import Session, open_session

from .scripted_parts import SEEN

HERE = Path(__file__).parent

Given: TypeAlias = Mapping[str, Any]
"""Changes to the bench's configuration, by dotted key; a value may be a table."""

TASKS: Mapping[str, list[dict[str, Any]]] = {
    "tasks": [
        {"id": "a", "input": {"answer": "5", "calls": 2}, "result": "5", "also": "4"},
        {"id": "b", "input": {"answer": "6 apples"}, "result": "7 apples", "also": "8 apples"},
    ],
    "by_turns": [
        {"id": id, "input": {"answer": "5", "calls": 4, "agents": ["writer", "critic"]}, "result": "5"} for id in "ab"
    ],
    "titled": [
        {"id": id, "input": {"answer": "5", "calls": 4, "agents": ["writer", "housekeeping"]}, "result": "5"}
        for id in "ab"
    ],
    "other": [{"id": id, "input": {"answer": "5"}, "result": "5", "also": "4"} for id in "pqrs"],
    "restarting": [{"id": id, "input": {"answer": "5", "fails": "first-attempt"}, "result": "5"} for id in "ab"],
    "slow": [{"id": "a", "input": {"answer": "5", "wait": 1.0}, "result": "5"}],
}
"""Files of tasks beside the configuration."""


Observe: TypeAlias = "Callable[[Bench, Given], Any | Awaitable[Any]]"
"""Looks at the bench with these changes."""


@dataclass(frozen=True)
class Effect:
    """`observe` sees something else once `change` is made to a run that has `given`."""

    observe: Observe
    change: Given
    given: Given = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    folder: Path
    summary: Summary
    seen: Mapping[str, Any]
    attempts: list[Attempt]

    @property
    def updates(self) -> list[Mapping[str, Any]]:
        updates: list[Mapping[str, Any]] = self.seen["updates"]
        return updates

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def requested(self, field: str) -> list[Any]:
        """The distinct values of a field of the requests that reached the engine."""
        return sorted({request[field] for request in self.seen["requests"]})


class Bench:
    """A folder with a configuration to change.

    Runs and observations are kept, since most effects are seen against the same ones.
    """

    def __init__(self, folder: Path, weights: Path) -> None:
        self.folder, self.weights = folder, weights
        self._base: dict[str, Any] = {
            "config_version": 1,
            "runs": str(folder / "runs"),
            "plugins": [str(HERE / "scripted_parts.py")],
            "agent": {"entry": "scripted_agent:solve", "attach": False},
            "tasks": {
                "train": {"source": "jsonl", "path": "tasks.jsonl"},
                "eval": {"source": "jsonl", "path": "other.jsonl"},
            },
            "policies": {"default": {"model": {"path": str(weights)}, "optimizer": {"learning_rate": 0.01}}},
            "sampling": {"max_tokens": 64},
            "train": {"steps": 2, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 100},
            "eval": {"tasks": 2, "modes": ["eval-greedy"], "every": 100},
            "workers": {"processes": 1, "concurrency": 8, "timeout": 30.0, "attempts": 1},
            "rewards": {"exact_match": {}},
            "algorithm": {"name": "grpo"},
            "engine": {"name": "scripted", "torch": {"cache_mib": 16, "threads": 1}},
            "trackers": {"tensorboard": False},
        }
        for name, rows in TASKS.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "below").mkdir()
        (folder / "below" / "tasks.jsonl").write_bytes((folder / "other.jsonl").read_bytes())
        self._runs: dict[str, Ran] = {}
        self._observed: dict[tuple[Observe, str], Any] = {}

    def written(self, given: Given = {}) -> dict[str, Any]:  # noqa: B006
        """The configuration with these changes, as a file would have it."""
        data = copy.deepcopy(self._base)
        for key, value in given.items():
            *tables, last = key.split(".")
            table = data
            for name in tables:
                table = table.setdefault(name, {})
            table[last] = value
        return data

    def load(self, given: Given = {}) -> LoadedConfig:  # noqa: B006
        """The configuration with these changes, read from a file as any is."""
        file = self.folder / "train.toml"
        file.write_text(tomli_w.dumps(self.written(given)))
        return load(file)

    def load_agent(self, name: str, code: str, given: Given = {}) -> LoadedConfig:  # noqa: B006
        """The same with an agent of this code in a run of this name."""
        (self.folder / f"{name}.py").write_text(code)
        return self.load({"agent.entry": f"{name}:solve", "name": name, **given})

    @asynccontextmanager
    async def serving(self, given: Given = {}) -> AsyncIterator[tuple[LightningServer, Session, Path]]:  # noqa: B006
        """A run's server, session and folder, before its first step."""
        loaded = self.load(given)
        run_dir = new_run_dir(loaded)
        async with (
            local_server(loaded, run_dir) as server,
            open_session(loaded, run_dir, server, Observer()) as session,
        ):
            yield server, session, run_dir

    async def observed(self, observe: Observe, given: Given) -> Any:
        """The effect's observation with these changes, made once."""
        key = observe, json.dumps(given, sort_keys=True)
        if key not in self._observed:
            observed = observe(self, given)
            self._observed[key] = await observed if inspect.isawaitable(observed) else observed
        return self._observed[key]

    async def run(self, given: Given) -> Ran:
        """Train with these changes, from the queue to the last checkpoint; the engine is a scripted one."""
        key = json.dumps(given, sort_keys=True)
        if key not in self._runs:
            loaded = self.load(given)
            run_dir = new_run_dir(loaded)
            summary = await train(loaded, run_dir, Observer())
            async with loaded.store.build(run_dir, True) as store:
                rollouts = await store.rollouts(run=run_dir.name)
                attempts = [attempt for rollout in rollouts for attempt in await store.attempts(rollout.id)]
            seen = json.loads((run_dir / SEEN).read_text())
            self._runs[key] = Ran(run_dir, summary, seen, attempts)
        return self._runs[key]


def ran(look: Callable[[Ran], Any]) -> Callable[[Bench, Given], Awaitable[Any]]:

    async def observe(bench: Bench, given: Given) -> Any:
        return look(await bench.run(given))

    return observe


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a policy: the scripted engine reads none of it."""
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), weights)
