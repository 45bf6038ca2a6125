"""Runs with checkpoints, as training leaves them, whose weights are not real, and an engine that loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec, Upstream
from agl_server.training.checkpoints import Checkpoints, RunState


def make_run(
    folder: Path,
    rewards: Mapping[int, float | None],
    *,
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    adapter: bool = False,
    base: Path | None = None,
    keep: int = 100,
) -> Checkpoints:
    """A run with a checkpoint of each step, evaluated with that reward or not at all."""
    folder.mkdir(parents=True)
    base = base or folder.parent / f"{folder.name}-base"
    base.mkdir(exist_ok=True)
    sections = policies or {"default": {"model": {"path": str(base), **({"lora": {"rank": 4}} if adapter else {})}}}
    config = {
        "config_version": 1,
        "name": folder.name,
        "folder": str(folder),
        "agent": {"entry": "agent:solve"},
        "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
        "policies": sections,
        "sampling": {"max_tokens": 48},
        "algorithm": {"name": "grpo"},
        "credit": {"name": "identical"},
        "rewards": {"answer": {"rule": "exact_match"}},
        "seed": 1,
        "train": {"steps": 40, "groups_per_step": 4, "group_size": 8},
        "engine": {"name": "not-installed"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for step, reward in rewards.items():
        add_checkpoint(checkpoints, step, reward, config, adapter=adapter)
    return checkpoints


def add_checkpoint(
    checkpoints: Checkpoints, step: int, reward: float | None, config: dict[str, Any], *, adapter: bool
) -> None:
    """One more, and the evaluation behind it."""
    part = checkpoints.begin(step)
    for policy in config["policies"]:
        model = part / policy / "model"
        model.mkdir(parents=True)
        (model / "weights").write_text(f"{policy} of step {step}")
        (model / ("adapter_config.json" if adapter else "config.json")).write_text("{}")
    evaluation = {"step": step, "set": "eval", "mode": "greedy", "reward": reward, "rollouts": 20}
    evaluations = [] if reward is None else [evaluation]
    checkpoints.commit(part, RunState(step=step, evaluations=evaluations, config=config))


@dataclass
class LoadingEngine:
    """An engine that notes which weights it loads; `url` answers in its place."""

    url: str
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
