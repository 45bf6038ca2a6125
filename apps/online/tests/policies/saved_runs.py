"""Runs with checkpoints, as training leaves them, whose weights are not real."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from agl_core.training.checkpoints import Checkpoints, RunState


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
        "train": {"steps": 40},
        "engine": {"name": "not-installed"},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    for step, reward in rewards.items():
        add_checkpoint(checkpoints, step, reward, list(sections), adapter=adapter)
    return checkpoints


def add_checkpoint(
    checkpoints: Checkpoints, step: int, reward: float | None, policies: list[str], *, adapter: bool = False
) -> None:
    """One more, and the evaluation behind it."""
    part = checkpoints.begin(step)
    for policy in policies:
        model = part / policy / "model"
        model.mkdir(parents=True)
        (model / "weights").write_text(f"{policy} of step {step}")
        (model / ("adapter_config.json" if adapter else "config.json")).write_text("{}")
    evaluations = [] if reward is None else [{"step": step, "set": "eval", "mode": "greedy", "reward": reward}]
    checkpoints.commit(part, RunState(step=step, evaluations=evaluations))
    if reward is not None:
        line = {"step": step, "kind": "eval", "eval/greedy/reward/mean": reward, "eval/greedy/rollouts": 20.0}
        with (checkpoints.folder.parent / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
