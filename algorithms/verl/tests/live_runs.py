"""Whole runs of `agl train` under veRL: GRPO, pairs, demonstrations, and kills in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import psutil
import pytest

from agl_core.types import Ending
from agl_server.store.sqlite import SqliteStore

from . import live_engine

CALC = Path(__file__).resolve().parents[3] / "examples" / "calc" / "train.toml"
STEPS = 5
SMALL = {
    "train.steps": STEPS,
    "train.groups_per_step": 4,
    "train.group_size": 4,
    "train.checkpoint_every": 2,
    "eval.tasks": 4,
    "eval.every": 100,
    "engine.name": "verl",
    "engine.verl.gradient_checkpointing": "false",
}
pytestmark = pytest.mark.timeout(3600)


def command(runs: Path, config: Path = CALC, **settings: Any) -> list[str]:
    chosen = [f"--set={key}={value}" for key, value in {**SMALL, "runs": runs, **settings}.items()]
    return [agl(), "train", str(config), *chosen]


def agl() -> str:
    return str(Path(sys.executable).with_name("agl"))


def resume(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([agl(), "train", "--resume", str(run)], capture_output=True, text=True)


def steps_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    whole = (
        file.read_text().rpartition("\n")[0] if file.exists() else ""
    )  # While it goes on, the last may be half there.
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_reward_of_a_real_agent_rises(tmp_path: Path) -> None:
    """The same settings bring the torch engine from 0.05 to 0.75 in as many steps."""
    settings = {"algorithm.name": "grpo", "train.steps": 10, "train.groups_per_step": 8, "train.group_size": 8}
    done = subprocess.run(command(tmp_path, **settings), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = steps_of(tmp_path / "calc")
    rewards = [line["reward/mean"] for line in steps]
    assert len(rewards) == 10
    assert mean(rewards[:2]) < 0.25, rewards
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.3, rewards
    assert all(line["update/grad_norm"] > 0 for line in steps if line["update/transitions_trained"])


def test_a_policy_learns_from_pairs(tmp_path: Path) -> None:
    """Its advantages are made of log-probabilities of both models, which are the same before the first step."""
    settings = {"algorithm.name": "dpo", "train.steps": 2, "seed": 1}
    settings |= {"train.groups_per_step": 8, "train.group_size": 8}
    done = subprocess.run(command(tmp_path, **settings), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    first, second = steps_of(tmp_path / "calc")
    assert first["update/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["update/pair_margin"] == pytest.approx(0.0, abs=1e-3)
    assert second["update/pair_margin"] > 1e-3
    assert second["update/grad_norm"] > 0


def test_a_policy_imitates_recorded_conversations(tmp_path: Path) -> None:
    """Texts, which the engine tokenises; loss and accuracy of those held out are those of the torch engine."""
    demonstrations = tmp_path / "demonstrations.jsonl"
    with demonstrations.open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"What is {number} plus 1?"},
                {"role": "assistant", "content": f"It is {number + 1}."},
                {"role": "user", "content": "And plus 1 again?"},
                {"role": "assistant", "content": f"That is {number + 2}."},
            ]
            line = {"messages": messages, "split": "eval" if number < 4 else "train"}
            file.write(json.dumps(line) + "\n")
    talk = f'source = "recorded"\nrun = "{demonstrations}"'
    (tmp_path / "train.toml").write_text(
        f'config_version = 1\nname = "calc"\n[tasks.train]\n{talk}\nsplit = "train"\n[tasks.eval]\n{talk}\n'
        f'split = "eval"\n[policies.default]\nmodel = {{path = "{CALC.parent / "policy"}", dtype = "float32"}}\n'
        "optimizer.learning_rate = 1e-3\n"
    )
    scores = {}
    for engine in ("torch", "verl"):
        runs = tmp_path / engine
        settings = {"algorithm.name": "sft", "train.steps": 3, "engine.name": engine}
        done = subprocess.run(command(runs, tmp_path / "train.toml", **settings), capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        lines = [json.loads(line) for line in (runs / "calc" / "metrics.jsonl").read_text().splitlines()]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        scores[engine] = [(line["eval/loss"], line["eval/accuracy"]) for line in evaluations]
        assert {line["eval/tokens"] for line in evaluations} == {float(evaluations[0]["eval/tokens"])}
        assert all(line["transitions/kept"] == 8 and "reward/mean" not in line for line in steps_of(runs / "calc"))
    (loss_before, accuracy_before), *_, (loss, accuracy) = scores["verl"]
    assert loss < loss_before
    assert accuracy > accuracy_before
    np.testing.assert_allclose(scores["verl"], scores["torch"], rtol=1e-3)


def test_a_run_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With servers of their own, and rollouts under way all the time."""
    run = tmp_path / "calc"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Where `cpu_weights` is.
    beside = {
        "engine.verl.serving_gpus": 1,
        "engine.verl.overrides": json.dumps(live_engine.CPU_WEIGHTS),
        "async.max_staleness": 1,
    }
    killed = subprocess.Popen(command(tmp_path, **beside), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    while len(steps_of(run)) < 3:
        assert killed.poll() is None, (run / "engine.log").read_text()[-2000:]
        time.sleep(1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 120
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(1)
    assert processes_of(run) == [], "the engine does not outlive the run"

    done = resume(run)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["restart"] for line in steps] == [0, 0, 1, 1, 1], "from the checkpoint of step 2"


def test_a_core_of_vllm_that_dies_ends_the_run_and_scores_nothing(tmp_path: Path) -> None:
    """Ray sees nothing of it: it is a child of an actor, which lives on. It dies while agents wait for replies."""
    run = tmp_path / "calc"
    training = subprocess.Popen(
        command(tmp_path, **{"train.group_size": 32}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while len(steps_of(run)) < 2:
            assert training.poll() is None, training.communicate()[0]
            time.sleep(0.1)
        engine = psutil.Process(training.pid).children(recursive=True)
        [core] = [process for process in engine if "EngineCore" in " ".join(process.cmdline())]
        core.kill()
        killed = time.monotonic()
        output = " ".join(training.communicate(timeout=120)[0].split())
    finally:
        training.kill()
    assert time.monotonic() - killed < 60
    assert training.returncode == 2, output
    assert "A process of the engine was lost" in output
    assert "agl train --resume" in output
    assert (run / "engine.log").stat().st_size < 2**20
    assert Ending.CRASHED not in asyncio.run(endings_of(run))

    done = resume(run)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))


async def endings_of(run: Path) -> set[Ending | None]:
    async with SqliteStore(run / "store.sqlite", read_only=True) as store:
        return {attempt.ending for attempt in await store.attempts(*(r.id for r in await store.rollouts()))}


def processes_of(run: Path) -> list[int]:
    """The drivers that have this run's log open."""
    ids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "2") == str(run / "engine.log"):
                ids.append(int(process.name))
        except OSError:
            continue
    return ids
