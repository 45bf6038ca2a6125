"""A short run of the real command on the shipped policy: who is trained, by its records."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Mode

EXAMPLE = Path(__file__).parents[1]
SETTINGS = {
    "runs": "runs",
    "train.steps": 1,
    "train.groups_per_step": 3,
    "eval.every": 0,
    "engine.torch.threads": 1,
    "trackers.tensorboard": "false",
}


async def recorded(run: Path) -> Any:
    async with SqliteStore(run / "store.sqlite", read_only=True) as store:
        rollouts = await store.rollouts(mode=Mode.TRAIN)
        keys = [AttemptKey(each.id, each.counted_attempt or 0) for each in rollouts]
        return await store.calls(keys), await store.training_records(keys), await store.rewards(keys)


def test_the_checker_takes_part_in_the_return_and_is_never_in_a_batch(tmp_path: Path) -> None:
    chosen = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    command = [Path(sys.executable).with_name("agl"), "train", EXAMPLE / "train.toml", *chosen]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr

    calls, records, rewards = asyncio.run(recorded(tmp_path / "runs" / "sql"))
    agents = {call.id: call.agent for call in calls}
    assert set(agents.values()) == {"writer", "checker", "rewriter"}
    assert {call.policy for call in calls} == {"default"}
    earned = {reward.rollout: reward.value for reward in rewards}
    assert set(earned.values()) == {0.0, 1.0}
    dropped = Counter((agents[record.call], record.dropped) for record in records)
    assert {reason for agent, reason in dropped if agent == "checker"} == {"untrained_agent"}
    assert not any(reason == "untrained_agent" for agent, reason in dropped if agent != "checker")
    weights = Counter[str]()
    for record in records:
        weights[agents[record.call] or ""] += record.weight or 0
        assert record.credit == earned[record.rollout]
    assert weights["checker"] == 0
    assert weights["writer"] > 0
    assert weights["rewriter"] > 0
