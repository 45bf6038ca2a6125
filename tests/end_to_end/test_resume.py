"""A run that is killed or interrupted goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Mode, RolloutState

from .conftest import write_run

KILLS_ITS_ENGINE = """
from pathlib import Path

import openai
import psutil

async def solve(task, context):
    if not Path("killed").exists():
        Path("killed").touch()
        for child in psutil.Process().children():
            if "agl_torch.process" in child.cmdline():
                child.kill()
    async with openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": task}])
    return reply.choices[0].message.content
"""
VOLATILE = ("seconds", "restart", "memory", "peak")


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what time and place decide."""
    return [
        {k: v for k, v in line.items() if k != "time" and not any(word in k for word in VOLATILE)} for line in lines
    ]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint that is a tensor: weights and optimiser state."""
    found: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, each in value.items():
                walk(f"{prefix}/{key}", each)
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                walk(f"{prefix}/{number}", each)

    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".safetensors":
            walk(name, load_file(path))
        elif path.suffix == ".pt":
            walk(name, torch.load(path, weights_only=False))
    return found


def in_the_middle_of(store: Path, step: int) -> bool:
    """Whether a rollout of this step is running and has made an LLM call by now."""

    async def look() -> bool:
        async with SqliteStore(store, read_only=True) as opened:
            running = await opened.rollouts(step=step, mode=Mode.TRAIN, state=RolloutState.RUNNING)
            return bool(await opened.calls(AttemptKey(rollout.id, 0) for rollout in running))

    # Before that, the store may just be being made, and looking into it would only cost time.
    started = (store.parent / "checkpoints" / f"step-{step - 1:06d}").exists()
    return started and asyncio.run(look())


def test_killed_in_the_middle_of_a_step_it_resumes_bit_for_bit(agl: Any) -> None:
    settings = ["train.deterministic=true", "workers.concurrency=16", "train.steps=3"]
    agl.run(*agl.calc(*settings, "name=whole"))

    killed = agl.start(*agl.calc(*settings, "name=killed"))
    store = agl.folder / "runs" / "killed" / "store.sqlite"
    killed.until(lambda: in_the_middle_of(store, step=3))
    killed.kill()
    [entry] = [
        each
        for each in json.loads(agl.look("runs", "list", agl.folder / "runs", "--json"))
        if each["folder"].endswith("killed")
    ]
    assert entry["state"] == "failed"
    steps = [line["step"] for line in agl.metrics("killed") if line["kind"] == "train"]
    assert steps == [1, 2]
    agl.run("train", "--resume", agl.folder / "runs" / "killed")

    whole, resumed = (agl.folder / "runs" / name / "checkpoints" / "step-000003" for name in ("whole", "killed"))
    expected, found = tensors(whole), tensors(resumed)
    assert len(expected) > 50
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert comparable(agl.metrics("killed")) == comparable(agl.metrics("whole"))
    assert any(line["update/grad_norm"] > 0 for line in agl.metrics("whole") if line["kind"] == "train")
    shown = agl.look("rollouts", agl.folder / "runs" / "killed", "--step=3", "--limit=40")
    assert "superseded" in shown


@pytest.mark.storm
def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(agl: Any) -> None:
    command = agl.start(*agl.calc("name=stopped", "train.checkpoint_every=100", "eval.every=4"))
    command.until(lambda: any(line["step"] == 1 and line["kind"] == "train" for line in agl.metrics("stopped")))
    command.process.send_signal(signal.SIGINT)
    assert command.wait(120) == 130, command.output()
    stopped = agl.summary("stopped")
    assert stopped["interrupted"]
    assert stopped["reward"]["after"] == {"greedy": None, "sampled": None}, "it was evaluated before training alone"
    assert re.search(r"greedy +│ +0\.\d{3} │ +– │", command.output())
    assert 1 <= stopped["steps"] < 4
    assert "agl train --resume" in command.output()
    agl.run("train", "--resume", agl.folder / "runs" / "stopped")
    summary = agl.summary("stopped")
    assert (summary["interrupted"], summary["steps"]) == (False, 4)
    assert [line["step"] for line in agl.metrics("stopped") if line["kind"] == "train"] == [1, 2, 3, 4]
    assert summary["reward"]["before"] == stopped["reward"]["before"]


def test_an_engine_that_dies_while_agents_run_is_the_reason_that_is_given(agl: Any) -> None:
    """Not the agents, which are lost with it, and also where the run had only had its first look at them."""
    policies = {"default": {"model": {"path": "policy"}}}
    dies = agl.start("train", write_run(agl.folder, KILLS_ITS_ENGINE, 1, eval={"every": 0}, policies=policies))
    assert dies.wait() == 2
    assert "Error: The engine was lost during 'rollouts' (exit code -9)" in dies.output()
    assert "agent does not work" not in dies.output()
    agl.run("train", "--resume", agl.folder / "runs" / "run")
