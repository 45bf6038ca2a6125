"""GRPO under veRL makes a real agent better: a short run of the calc example, its agents outside Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean

import pytest

from . import live_runs

STEPS = 10
pytestmark = pytest.mark.timeout(3600)


def test_the_reward_rises(tmp_path: Path) -> None:
    """The same settings bring the torch engine from 0.05 to 0.75 in as many steps."""
    settings = {
        "algorithm.name": "grpo",
        "train.steps": STEPS,
        "train.groups_per_step": 8,
        "train.group_size": 8,
        "train.checkpoint_every": STEPS,
        "eval.tasks": 20,
        "eval.every": STEPS,
    }
    done = subprocess.run(live_runs.command(tmp_path, **settings), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = live_runs.steps_of(tmp_path / "calc")
    rewards = [line["reward/mean"] for line in steps]
    assert len(rewards) == STEPS
    assert mean(rewards[:2]) < 0.25, rewards
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.3, rewards
    assert all(line["update/grad_norm"] > 0 for line in steps if line["update/transitions_trained"])
