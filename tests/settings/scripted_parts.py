"""A plugin file: an engine without weights that writes down what it was asked, a second store and task source."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import agl_core
from agl_core import Capability, kinds
from agl_core.kinds import NoOptions, Register
from agl_core.protocols import Engine, EngineContext, Progress, UpdateResult, Upstream
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Batch, Task
from agl_server.store.sqlite import SqliteStore

SEEN = "seen.json"
"""The file that the engine writes into the run's folder when it is stopped."""
WEIGHTS = "weights.json"
"""The file that it writes into a checkpoint."""
MEASURED = {"loss": 0.5, "prob_gap_mean": 0.05, "prob_sampled_mean": 0.9, "prob_trained_mean": 0.85}
"""The metrics of every update."""


class ScriptedEngine(Engine):
    """Serves a scripted upstream; an update changes nothing but the version."""

    def __init__(self, name: str, options: NoOptions, context: EngineContext) -> None:
        self._context, self._upstream = context, ScriptedUpstream()
        self._versions = dict.fromkeys(context.policies, 0)
        self._seen: dict[str, Any] = {
            "engine": name,
            "policies": {name: asdict(spec) for name, spec in context.policies.items()},
            "updates": [],
            "saved": [],
            "loaded": [],
        }

    async def start(self) -> Upstream:
        await self._upstream.__aenter__()
        return Upstream((self._upstream.url,), {name: name for name in self._versions}, self._context.api_key)

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        named = ("values", "group", "rollout", "turn", "version", "weight")
        columns = {name: getattr(batch, f"{name}_N").tolist() for name in named}
        self._seen["updates"].append({"policy": policy, "kind": batch.kind, "calls": batch.calls, **columns})
        self._versions[policy] += 1
        zeros = np.zeros(len(batch))
        return UpdateResult(self._versions[policy], dict(MEASURED), zeros, zeros, (None,) * len(batch))

    async def save(self, folder: Path) -> None:
        self._seen["saved"].append(folder.name)
        (folder / WEIGHTS).write_text(json.dumps(self._versions))

    async def load(self, folder: Path) -> None:
        self._seen["loaded"].append(folder.name)
        self._versions = json.loads((folder / WEIGHTS).read_text())

    async def versions(self) -> Mapping[str, int]:
        return self._versions

    async def stats(self) -> Mapping[str, float]:
        """Ten tokens prefilled and two sampled by request, and five trained by transition."""
        asked, trained = len(self._upstream.received), sum(len(update["values"]) for update in self._seen["updates"])
        kinds_of = {"prefilled": 10 * asked, "reused": asked, "decoded": 2 * asked, "trained": 5 * trained}
        return {f"tokens_{kind}": float(count) for kind, count in kinds_of.items()}

    async def stop(self) -> None:
        self._seen["counted"] = await self.stats()
        await self._upstream.__aexit__()
        self._seen["requests"] = [received.body for received in self._upstream.received]
        (self._context.run_dir / SEEN).write_text(json.dumps(self._seen, default=dict))


class Counting:
    """Three tasks, named by numbers."""

    size = 3

    def task(self, index: int) -> Task:
        return Task(str(index), {"answer": "5"}, metadata={"result": "5"})


@agl_core.hookimpl
def register_components(register: Register) -> None:
    for name in ("scripted", "scripted-too"):
        register(
            kinds.ENGINE,
            name,
            functools.partial(ScriptedEngine, name),
            provides={Capability.TOKEN_IDS, Capability.REFERENCE, Capability.CRITIC},
        )

    def build_store(options: NoOptions, folder: Path, read_only: bool = False) -> SqliteStore:
        return SqliteStore(folder / "another.sqlite", read_only=read_only)

    register(kinds.STORE, "another", build_store)
    register(kinds.TASK_SOURCE, "counting", lambda options, folder, seed: Counting())
