"""Whole runs of `agl train` under veRL: GRPO, an adapter, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM

from agl_core.protocols import PolicySpec
from agl_torch.loading import load_model

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


def command(runs: Path, **settings: Any) -> list[str]:
    chosen = [f"--set={key}={value}" for key, value in {**SMALL, "runs": runs, **settings}.items()]
    return [agl(), "train", str(CALC), *chosen]


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


OWN_ALGORITHM = """
import agl_core
import torch
from agl_algorithms import PolicyGradient, PolicyGradientOptions

@agl_core.algorithm(name="mine", options=PolicyGradientOptions, needs=PolicyGradientOptions.needs)
class Mine(PolicyGradient):
    def advantages(self, samples, values_R=None):
        return samples.at_tokens(torch.full_like(samples.values_N, 0.25))
"""


def test_an_adapter_is_served_as_it_is_trained_and_saved_as_others_read_it(
    tmp_path: Path,
) -> None:
    """In the second step the servers have the weights of the first update: the base alone would differ by 0.99.

    An algorithm of the user's makes the advantages the same for all, so that every step has a gradient.
    """
    (tmp_path / "mine.py").write_text(OWN_ALGORITHM)
    adapter = {
        "algorithm.name": "mine",
        "plugins": json.dumps([str(CALC.parent / "tasks.py"), str(tmp_path / "mine.py")]),
        "train.steps": 2,
        "policies.default.model.lora.rank": 8,
        "policies.default.optimizer.learning_rate": 4e-3,
    }
    done = subprocess.run(command(tmp_path, **adapter), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = steps_of(tmp_path / "calc")
    assert [line["update/advantage_mean"] for line in steps] == pytest.approx([0.25] * 2)
    assert all(line["update/grad_norm"] > 0 for line in steps)
    # veRL merges the adapter in bfloat16.
    assert max(line["update/rollout_probs_diff_max"] for line in steps) < 0.02
    saved = tmp_path / "calc" / "model"
    assert (saved / "agl_base.json").is_file()
    spec = PolicySpec(str(CALC.parent / "policy"), "float32", adapter=str(saved))
    trained = [
        weight.abs().max().item()
        for name, weight in load_model(spec, torch.device("cpu"), 0).model.named_parameters()
        if "lora_B" in name
    ]
    assert min(trained) > 0
    prompt, logits = torch.arange(20)[None], []
    written = [agl(), "policy", "export", f"{tmp_path / 'calc'}@latest", "--out", str(tmp_path / "export")]
    done = subprocess.run(written, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for model in (
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32),
        load_model(spec, torch.device("cpu"), 0).model,
    ):
        with torch.no_grad():
            logits.append(model.eval()(prompt).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


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
