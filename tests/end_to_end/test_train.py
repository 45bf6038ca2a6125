"""What a user sees of a run: its folder, its tables, its rollouts."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agl_core.types import Mode

from .conftest import Records, recorded


def second_turn_reuse(records: Records) -> float:
    """The share of the first turn's tokens that were in the cache when the second turn was asked for."""
    prefix = reused = 0
    for first, second, *_ in (calls for calls in records.calls.values() if len(calls) > 1):
        assert first.prompt_ids is not None
        assert first.choices[0].response_ids is not None
        prefix += len(first.prompt_ids) + len(first.choices[0].response_ids)
        reused += second.reused
    return reused / prefix


def test_a_small_run_leaves_everything_it_promises(agl: Any) -> None:
    output = agl.run(*agl.calc("seed=3", "trackers.tensorboard={}"), "--seed", "5")
    folder = agl.folder / "runs" / "calc"
    summary = agl.summary("calc")
    assert summary["seed"] == 5
    for when in ("before", "after"):
        assert set(summary["reward"][when]) == {"greedy", "sampled"}
        assert all(0 <= value <= 1 for value in summary["reward"][when].values())
    assert summary["llm_calls"] >= 4 * 16 + 2 * 2 * 2
    assert summary["transitions"]["kept"] > 0
    assert summary["seconds"] > 0
    assert summary["peak_rss_bytes"] < 2 * 2**30
    resolved = tomllib.loads((folder / "config.toml").read_text())
    assert (resolved["seed"], resolved["train"]["steps"]) == (5, 4)
    assert list(folder.glob("**/events.out.tfevents*"))
    lines = agl.metrics("calc")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 2, 4]
    records = recorded(folder, Mode.TRAIN)
    assert second_turn_reuse(records) >= 0.9
    step_line = r"(?m)^step +(\d)/4  reward [\d.]+  \d+ \+ \d+ tokens  rollouts .* s  update .* s$"
    assert re.findall(step_line, output) == ["1", "2", "3", "4"]
    assert re.search(r"(?m)^the engine, after \d+ s: loading the weights$", output)
    for promised in ("before", "after", "transitions", "checkpoint", "runs/calc/model", "next: agl"):
        assert promised in output

    listed = agl.look("rollouts", folder, "--step=1", "--mode=train", "--limit=100")
    assert listed.count("s1-g") == 16
    shown = agl.look("show", folder, "s1-g0-m0")
    for promised in ("turn 0", "tokens", "terminal reward", "advantage" if "advantage" in shown else "dropped"):
        assert promised in shown

    unequal = next(id for id, training in records.training.items() if any(record.advantage for record in training))
    explained = agl.look("show", folder, unequal)
    [(mean, std)] = re.findall(r"mean credit (\S+), standard deviation (\S+), over", explained)
    for credit, advantage in re.findall(r"credit (\S+)  advantage (\S+)", explained):
        assert float(advantage) == pytest.approx((float(credit) - float(mean)) / float(std), rel=2e-3)

    printed = agl.run("eval", f"{folder}@3", "--json")
    evaluated = json.loads(printed[printed.index("{\n") :])  # Before it, on the error stream, what is under way.
    assert {entry["set"] for entry in evaluated["evaluations"]} == {"eval", "eval_templates"}
    last = agl.metrics("calc")[-1]
    assert (last["kind"], last["step"], last["restart"]) == ("eval", 3, 1)
    for entry in evaluated["evaluations"]:
        assert last[f"{entry['set']}/{entry['mode']}/reward/mean"] == entry["reward"]
    assert "superseded" not in agl.look("rollouts", folder, "--step=4", "--mode=train")

    saved = load_file(folder / "checkpoints" / "step-000004" / "default" / "model" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert saved
    assert all(torch.equal(weights, loaded[name]) for name, weights in saved.items())
