"""The run whose pages are measured: many rollouts, put into its store through the store's own interface."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from server_records import recorded_call

from agl_core.store.interface import Record
from agl_core.store.sqlite import SqliteStore
from agl_core.types import (
    Attempt,
    Ending,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Task,
    TrainingRecord,
)

GROUP, GROUPS_PER_STEP, TURNS = 8, 50, 2
STEP_ROLLOUTS = GROUP * GROUPS_PER_STEP
EVAL_EVERY, EVAL_TASKS = 25, 100
CONFIG = """config_version = 1
name = "large"
[agent]
entry = "my_agent:solve"
[tasks.train]
source = "jsonl"
path = "tasks.jsonl"
[policies.default.model]
path = "weights"
[algorithm]
name = "grpo"
[engine]
name = "torch"
[train]
steps = 100000
[rewards.right]
rule = "numeric_match"
"""


def made_run(folder: Path, rollouts: int) -> Path:
    """A run of so many training rollouts, with evaluations, unless it is there already."""
    if not (folder / "metrics.jsonl").exists():
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(CONFIG)
        lines = asyncio.run(_fill(folder / "store.sqlite", rollouts))
        (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return folder


async def _fill(file: Path, rollouts: int) -> list[dict[str, Any]]:
    """The store; returns the lines of the run's metrics."""
    chance = random.Random(0)
    lines: list[dict[str, Any]] = []
    steps = rollouts // STEP_ROLLOUTS
    async with SqliteStore(file) as store:
        await store.put(Run("large", 0, 0.0, {"rewards": {"right": {"weight": 1.0}}}))
        for step in range(steps + 1):
            if step:
                await store.put(*_training(step, chance))
                lines.append(_metrics(step, chance))
            if step % EVAL_EVERY == 0:
                await store.put(*_evaluation(step, chance))
                lines.append({"step": step, "kind": "eval", "restart": 0, "eval/greedy/reward/mean": chance.random()})
    return lines


def _training(step: int, chance: random.Random) -> Iterator[Record]:
    for group in range(GROUPS_PER_STEP):
        name = f"s{step}-g{group}"
        task = Task(name, {"question": f"When does my train leave? Question {name}"}, metadata={"answer": "09:30"})
        for member in range(GROUP):
            rollout = Rollout(f"{name}-m{member}", "large", 0, name, task, Mode.TRAIN, step, member)
            yield from _recorded(rollout, chance)


def _evaluation(step: int, chance: random.Random) -> Iterator[Record]:
    for number in range(EVAL_TASKS):
        name = f"s{step}-eval-greedy-g{number}"
        task = Task(f"e{number}", {"question": f"When does the train {number} leave?"}, split="eval")
        yield from _recorded(Rollout(f"{name}-m0", "large", 0, name, task, Mode.EVAL_GREEDY, step, 0), chance)


def _recorded(rollout: Rollout, chance: random.Random) -> Iterator[Record]:
    began = 10.0 * rollout.step
    yield replace(rollout, state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED)
    yield Attempt(rollout.id, 0, "w", began, began + 5, Ending.FINISHED, result="09:30")
    reward = float(chance.random() < rollout.step / 300)
    yield Reward(rollout.id, 0, "right", reward, "right")
    for turn in range(TURNS):
        times = {"started": began + 2 * turn, "ended": began + 2 * turn + 1}
        call = replace(recorded_call(rollout, turn), id=f"{rollout.id}-c{turn}", agent="solver", **times)
        yield call
        if rollout.mode.trains:
            yield TrainingRecord(rollout.id, 0, call.id, 0, rollout.step, reward, reward - 0.5, 0.01, None)


def _metrics(step: int, chance: random.Random) -> dict[str, Any]:
    random_keys = (
        "reward/mean",
        "groups/no_contrast",
        "update/loss",
        "update/kl_behaviour",
        "update/entropy",
        "update/grad_norm",
    )
    return {
        "step": step,
        "kind": "train",
        "restart": 0,
        "dropped/no_advantage": float(chance.randrange(100)),
        **{key: chance.random() for key in random_keys},
        "seconds/rollouts": 5.0,
        "seconds/update": 3.0,
        "seconds/step": 8.5,
        "length/prompt": 400.0,
        "length/response": 60.0,
        "tokens/prefilled": 1e6,
        "tokens/reused": 3e6,
        "tokens/decoded": 2e5,
    }
