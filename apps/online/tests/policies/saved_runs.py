"""Runs with checkpoints, as training leaves them, whose weights are not real; how they are deployed, and an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tomli_w

from agl_core.config.load import LoadedConfig
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec, Upstream
from agl_core.testing.scripts import Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_online.versions import DecidedBy, Decision, Ledger, State, VersionsNow
from agl_server.training.checkpoints import Checkpoints, RunState


def make_run(folder: Path, rewards: Mapping[int, float | None], model: str = "config.json", **tables: Any) -> None:
    """A run with a checkpoint of each step, evaluated with that reward or not at all; `model` is a file of each."""
    base = folder.parent / "base"
    base.mkdir(parents=True, exist_ok=True)
    lora = {} if model == "config.json" else {"lora": {"rank": 4}}
    config = {
        "config_version": 1,
        "name": folder.name,
        "folder": str(folder),
        "agent": {"entry": "agent:solve"},
        "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
        "policies": {"default": {"model": {"path": str(base), **lora}}},
        "sampling": {"max_tokens": 48},
        "algorithm": {"name": "grpo"},
        "credit": {"name": "identical"},
        "rewards": {"answer": {"rule": "exact_match"}},
        "engine": {"name": "not-installed"},
        **tables,
    }
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    checkpoints = Checkpoints(folder / "checkpoints", keep=100)
    for step, reward in rewards.items():
        part = checkpoints.begin(step)
        for policy in config["policies"]:
            weights = part / policy / "model"
            weights.mkdir(parents=True)
            (weights / "weights").write_text(f"{policy} of step {step}")
            (weights / model).write_text("{}")
        evaluation = {"step": step, "set": "eval", "mode": "greedy", "reward": reward, "rollouts": 20}
        evaluations = [] if reward is None else [evaluation]
        checkpoints.commit(part, RunState(step=step, evaluations=evaluations, config=config))


def make_deployed(folder: Path, *steps: int) -> Ledger:
    """A run with checkpoints of these steps, deployed with what training started from."""
    learning = {"online": {"applications": {"shop": 1}}, "learn": {"canary": {"share": 0.5}}}
    make_run(folder, dict.fromkeys(steps), **learning)
    ledger = Ledger(folder)
    ledger.begin(0, "What training started from.")
    return ledger


def decide(
    ledger: Ledger, step: int, state: State, by: DecidedBy = DecidedBy.GATE, figures: Mapping[str, float] | None = None
) -> VersionsNow:
    return ledger.record(Decision(step, state, by, f"{state} now.", figures or {}))


_WAY = {
    State.CANDIDATE: DecidedBy.TRAINING,
    State.PASSED: DecidedBy.GATE,
    State.CANARY: DecidedBy.CANARY,
    State.STABLE: DecidedBy.CANARY,
}


def promote(ledger: Ledger, step: int, to: State) -> None:
    """The way of a version up to this state: from training through the gate, then as the canary."""
    for state, by in _WAY.items():
        decide(ledger, step, state, by)
        if state is to:
            return


@dataclass
class LoadingEngine:
    """An engine that notes which weights it loads; `url` answers in its place."""

    url: str
    folder: Path
    loaded: dict[str, PolicySpec] = field(default_factory=dict)
    is_lost: bool = False
    fails: Sequence[int] = ()

    async def start(self) -> Upstream:
        return Upstream((self.url,), {}, "key")

    async def stop(self) -> None:
        self.is_lost = True

    async def versions(self) -> dict[str, int]:
        if self.is_lost:
            raise EngineError("The engine was lost.")
        return {}

    async def load_policy(self, name: str, spec: PolicySpec) -> None:
        if self.is_lost or spec.version in self.fails:
            raise EngineError("The weights cannot be read.")
        self.loaded[name] = spec

    async def unload_policy(self, name: str) -> None:
        del self.loaded[name]

    @property
    def steps(self) -> list[int]:
        return sorted(spec.version for spec in self.loaded.values())


@asynccontextmanager
async def loading_engines(module: str) -> AsyncIterator[tuple[ScriptedUpstream, list[LoadingEngine]]]:
    """The engines that this module makes, and the model behind them, which says by which name it was asked."""
    engines: list[LoadingEngine] = []

    def make(config: LoadedConfig, folder: Path) -> LoadingEngine:
        engines.append(LoadingEngine(model.url, folder))
        return engines[-1]

    async with ScriptedUpstream() as model:
        model.answer = lambda received: Say(received.body["model"])
        with mock.patch(f"{module}.make_engine", make):
            yield model, engines
