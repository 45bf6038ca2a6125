"""What trainers get of a run, without its plugins and server, and an engine without weights: for scripted runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agl_core import kinds
from agl_core.builtin import identical
from agl_core.config.models import RunConfig
from agl_core.config.resolve import ChosenComponent, PolicyPlan
from agl_core.kinds import Component, NoOptions
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Progress, UpdateResult
from agl_core.types import Batch, CreditKind, DropReason
from agl_server.health.alarms import StallWatch
from agl_server.training.metrics import Observer

MINIMAL: Mapping[str, Any] = {
    "config_version": 1,
    "agent": {"entry": "an_agent:solve"},
    "tasks": {"train": {"source": "numbers"}},
    "policies": {"default": {"model": {"path": "."}}},
}
"""The smallest configuration of a run."""


class CountingEngine(Engine):
    """An update keeps the batch and makes the next version."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.version = 0
        self.dropped: DropReason | None = None
        """Why no transition of a batch is trained on, if so."""
        self.metrics: dict[str, float] = {}
        """The metrics of every update."""

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        self.batches.append(batch)
        self.version += 1
        zeros = np.zeros(len(batch))
        return UpdateResult(self.version, self.metrics, zeros, zeros, (self.dropped,) * len(batch))

    async def versions(self) -> Mapping[str, int]:
        return {"default": self.version}

    async def start(self) -> Any: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def stop(self) -> None: ...


class Lines(Observer):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def scripted_config(config: RunConfig, plugins: Plugins | None = None, *, compares: bool = True) -> Any:
    """A loaded configuration with one policy, whose credit rule is `identical`; its groups are compared or not."""
    returns = frozenset({CreditKind.RETURN})
    credit = ChosenComponent(Component("", kinds.CREDIT, "scripted", lambda _: identical, yields=returns), NoOptions())
    algorithm = ChosenComponent(Component("", kinds.ALGORITHM, "scripted", lambda _: None), NoOptions())
    policies = {"default": PolicyPlan(algorithm, credit)}
    return SimpleNamespace(
        config=config,
        policies=policies,
        plugins=plugins or Plugins(),
        imitates=False,
        compares=compares,
        is_rewarded=True,
    )


def scripted_session(store: Any, version: int, **parts: Any) -> Any:
    """A session of `run` with this store, version and other parts."""
    server, versions = SimpleNamespace(store=store), {"default": version}
    return SimpleNamespace(**{"server": server, "run": "run", "versions": versions, "stall": StallWatch(), **parts})
