"""A run as a user sees it: its folder, tables and rollouts; killed or interrupted, it goes on as if nothing was."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from testing_aids import read_store
from transformers import AutoModelForCausalLM

from agl_core.types import AttemptKey, Call, Mode, RolloutState
from agl_server.store.sqlite import SqliteStore

from .conftest import CALC, ROOT, Agl


def by_rollout(records: Iterable[Any]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = {}
    for record in records:
        grouped.setdefault(record.rollout, []).append(record)
    return grouped


WHOLE = ["seed=3", "train.deterministic=true", "train.steps=2", "train.group_size=4", "eval.tasks=1"]
WHOLE += ["trackers.tensorboard={}", "workers.processes=1"]
"""Settings of a run with tasks of a mixture. Deterministic sampling takes its time: a step has eight rollouts."""
PARTS = ", ".join(f"{part} = {{source = 'calc', split = '{part}'}}" for part in ("train", "eval_templates"))
WHOLE.append(f"tasks.train={{source = 'mixture', parts = {{{PARTS}}}}}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that nothing disturbed, and what it printed."""
    agl = Agl(tmp_path_factory.mktemp("whole"))
    return agl.folder / "runs" / "calc", agl.run(*agl.calc(*WHOLE), "--seed", "5")


def test_a_small_run_leaves_everything_it_promises(agl: Any, whole: tuple[Path, str]) -> None:
    folder, output = shutil.copytree(whole[0], agl.folder / "runs" / "calc"), whole[1]
    summary = agl.summary("calc")
    assert summary["seed"] == 5
    for when in ("before", "after"):
        assert set(summary["reward"][when]) == {"greedy", "sampled"}
        assert all(0 <= value <= 1 for value in summary["reward"][when].values())
    assert summary["llm_calls"] >= 2 * 8 + 2 * 2 * 2
    assert summary["transitions"]["kept"] > 0
    assert summary["seconds"] > 0
    assert summary["peak_rss_bytes"] < 2 * 2**30
    resolved = tomllib.loads((folder / "config.toml").read_text())
    assert (resolved["seed"], resolved["train"]["steps"]) == (5, 2)
    assert list(folder.glob("**/events.out.tfevents*"))
    lines = agl.metrics("calc")
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 2]
    recorded = read_store(folder / "store.sqlite")
    in_training = {rollout.id for rollout in recorded.rollouts if rollout.mode is Mode.TRAIN}
    calls = by_rollout(call for call in recorded.calls if call.rollout in in_training)
    step_line = r"(?m)^step +(\d)/2  reward [\d.]+  \d+ \+ \d+ tokens  rollouts .* s  update .* s$"
    assert re.findall(step_line, output) == ["1", "2"]
    assert re.search(r"(?m)^the engine, after \d+ s: loading the weights$", output)
    for promised in ("before", "after", "transitions", "checkpoint", "runs/calc/model", "next: agl"):
        assert promised in output

    listed = agl.look("rollouts", folder, "--step=1", "--mode=train", "--limit=100")
    assert listed.count("s1-g") == 8
    shown = agl.look("show", folder, "s1-g0-m0")
    for promised in ("turn 0", "tokens", "terminal reward", "advantage" if "advantage" in shown else "dropped"):
        assert promised in shown

    training = by_rollout(recorded.training_records)
    unequal = next(id for id, used in training.items() if len(used) > 1 and any(record.advantage for record in used))
    explained = agl.look("show", folder, unequal)
    # The README's lines but for what is particular to its rollout, of which tools and figures are.
    readme = (ROOT / "README.md").read_text().partition("$ agl show s4-g1-m0\n")[2].partition("```")[0]
    forms = {_form(line) for line in readme.splitlines() if line not in ("", "…") and "user: " not in line}
    assert len(forms) == 7
    assert forms - {_form(line) for line in explained.splitlines()} == set()
    [(mean, std)] = re.findall(r"mean credit (\S+), standard deviation (\S+), over", explained)
    for credit, advantage in re.findall(r"credit (\S+)  advantage (\S+)", explained):
        assert float(advantage) == pytest.approx((float(credit) - float(mean)) / float(std), rel=2e-3)

    # Each token with a weight in the loss is proved, once; and one that is altered afterwards no longer is.
    trained = sum(line["update/tokens_trained"] for line in lines if line["kind"] == "train")
    assert summary["trained_tokens"] == {"count": trained, "exact_share": 1.0, "proved": {"exact": trained}}
    assert f"{trained:.0f} trained on: {trained:.0f} exact; proved to be what was sampled: 100.00%" in output
    used = [record for record in recorded.training_records if record.recomputed]
    assert len({(record.key, record.step) for record in used}) == len(used)
    assert sum((~np.isnan(record.recomputed.logprobs)).sum() for record in used if record.recomputed) == trained
    assert " exact" in agl.look("show", folder, used[0].rollout, "--tokens")
    asyncio.run(alter(folder, calls[used[0].rollout]))
    assert " other_tokens" in agl.look("show", folder, used[0].rollout, "--tokens")

    saved = load_file(folder / "checkpoints" / "step-000002" / "default" / "model" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert saved
    assert all(torch.equal(weights, loaded[name]) for name, weights in saved.items())


async def alter(run: Path, calls: Sequence[Call]) -> None:
    """Give the first token of each reply another id."""
    async with SqliteStore(run / "store.sqlite") as store:
        for call in calls:
            [choice] = call.choices
            assert choice.response_ids is not None
            ids = choice.response_ids + (np.arange(len(choice.response_ids)) == 0)
            await store.put(replace(call, choices=(replace(choice, response_ids=ids.astype(np.int32)),)))


def _form(line: str) -> str:
    """A line of `agl show` without figures and texts of the model.

    >>> _form('    tool calculator({"expression": "5/2"}): ok  "2.5"  (by x)')
    '    tool calculator(…): ok  …  (by x)'
    """
    line = re.sub(r"\(\{.*?\}\)", "(…)", re.sub(r'"[^"{}]*"(?=  \(by)', "…", line))
    return re.sub(r"(?: *-?\d[\d.]*(?:e-\d+)?)+", "#", line)


KILLS_ITS_ENGINE = """
from pathlib import Path

import openai
import psutil

async def solve(task, context):
    messages = [{"role": "user", "content": task["question"]}]
    if not Path("killed").exists():
        Path("killed").touch()
        here = psutil.Process()
        for process in (here, *here.parents()[:2]):  # The trainer's process is this one, or starts those of workers.
            for child in process.children():
                if "agl_torch" in child.cmdline():
                    child.kill()
    async with openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(model="default", messages=messages)
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
    leaves: dict[str, torch.Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            leaves[prefix] = value
        elif isinstance(value, dict):
            for key, inside in value.items():
                walk(f"{prefix}/{key}", inside)
        elif isinstance(value, list | tuple):
            for number, inside in enumerate(value):
                walk(f"{prefix}/{number}", inside)

    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".safetensors":
            walk(name, load_file(path))
        elif path.suffix == ".pt":
            walk(name, torch.load(path, weights_only=False))
    return leaves


def in_the_middle_of(store: Path, step: int) -> bool:
    """True once a rollout of this step is running and has made an LLM call."""

    async def look() -> bool:
        async with SqliteStore(store, read_only=True) as opened:
            running = await opened.rollouts(step=step, mode=Mode.TRAIN, state=RolloutState.RUNNING)
            return bool(await opened.calls(AttemptKey(rollout.id, 0) for rollout in running))

    # Before that, the store may just be being made, and looking into it would only cost time.
    started = (store.parent / "checkpoints" / f"step-{step - 1:06d}").exists()
    return started and asyncio.run(look())


def test_killed_in_the_middle_of_a_step_it_resumes_bit_for_bit(agl: Any, whole: tuple[Path, str]) -> None:
    run = agl.folder / "runs" / "killed"
    killed = agl.start(*agl.calc(*WHOLE, "name=killed"), "--seed", "5")
    killed.until(lambda: in_the_middle_of(run / "store.sqlite", step=2))
    killed.kill()
    [entry] = json.loads(agl.look("runs", "list", run.parent, "--json"))
    assert entry["state"] == "failed"
    assert [line["step"] for line in agl.metrics("killed") if line["kind"] == "train"] == [1]
    agl.run("train", "--resume", run)

    expected, recovered = (tensors(folder / "checkpoints" / "step-000002") for folder in (whole[0], run))
    assert len(expected) > 50
    assert expected.keys() == recovered.keys()
    assert [name for name in expected if not torch.equal(expected[name], recovered[name])] == []
    lines = [json.loads(line) for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    assert comparable(agl.metrics("killed")) == comparable(lines)
    assert any(line.get("update/grad_norm", 0) > 0 for line in lines)
    assert "superseded" in agl.look("rollouts", run, "--step=2", "--limit=40")


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
    (agl.folder / "killer.py").write_text(KILLS_ITS_ENGINE)
    example = CALC.parent
    there = [f"plugins=['{example}/tasks.py']", f"policies.default.model.path={example}/policy", f"folder={agl.folder}"]
    dies = agl.start(*agl.calc(*there, "agent.entry=killer:solve", "train.steps=1", "eval.every=0"))
    assert dies.wait() == 2
    assert "Error: The engine was lost during 'rollouts' (exit code -9)" in dies.output()
    assert "agent does not work" not in dies.output()
    assert "agl train --resume runs/calc" in dies.output()
    assert read_store(agl.folder / "runs" / "calc" / "store.sqlite").rollouts, "there is something to resume"
