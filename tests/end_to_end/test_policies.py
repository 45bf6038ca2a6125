"""Several policies in one run, asynchronous training, and a trained policy that leaves its run, as a user would."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from agl_core.capture.requests import HEADER_AGENT
from agl_core.types import Call, Ending, Mode, RolloutState

from .conftest import recorded, write_run

WRITER_AND_CRITIC = f'''
import openai

async def solve(task_input, context):
    """A writer drafts, a critic comments, the writer writes again; none knows what policies there are."""
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key)

    async def ask(agent, text):
        reply = await client.chat.completions.create(
            model="gpt-4o",
            messages=[{{"role": "user", "content": text}}],
            extra_headers={{"{HEADER_AGENT}": agent}},
        )
        return reply.choices[0].message.content

    draft = await ask("writer", task_input)
    opinion = await ask("critic-1", draft or "nothing")
    return await ask("writer", opinion or "nothing")
'''
POLICY = {"writer": "writer", "critic-1": "critic"}
"""Whose calls which policy answers."""


def weights(run: Path, step: int, policy: str) -> Path:
    return run / "checkpoints" / f"step-{step:06d}" / policy / "model" / "model.safetensors"


def trainer_state(run: Path, step: int, policy: str) -> dict[str, Any]:
    path = run / "checkpoints" / f"step-{step:06d}" / policy / "trainer.pt"
    weights: dict[str, Any] = torch.load(path, weights_only=True)
    return weights


def moved(before: Path, after: Path) -> bool:
    one, other = load_file(before), load_file(after)
    assert one.keys() == other.keys()
    return any(not torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_policy_stays_byte_identical_while_another_is_trained(agl: Any, tmp_path: Path) -> None:
    # Adam and weight decay would move whatever they touch.
    policy = {"model": {"path": "policy"}, "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1}}
    policies = {
        "writer": {**policy, "agents": ["writer"], "algorithm": {"name": "ppo"}},
        "critic": {**policy, "agents": ["critic-*"]},
    }
    agl.run("train", write_run(tmp_path, WRITER_AND_CRITIC, 2, train={"agents": ["writer"]}, policies=policies))
    run = tmp_path / "runs" / "run"

    start = tmp_path / "policy" / "model.safetensors"
    for step in (1, 2):
        assert weights(run, step, "critic").read_bytes() == start.read_bytes()
        assert moved(weights(run, step - 1, "writer") if step > 1 else start, weights(run, step, "writer"))
        assert trainer_state(run, step, "critic")["version"] == 0
        assert trainer_state(run, step, "writer")["version"] == step
    records = recorded(run, Mode.TRAIN)
    training = {record.call: record for rollout in records.training.values() for record in rollout}
    assert len(records.rollouts) == 16
    for rollout in records.rollouts.values():
        assert len(records.calls[rollout.id]) == 3
        for call in records.calls[rollout.id]:
            assert call.policy == POLICY[call.agent or ""]
            assert call.version == (rollout.step - 1 if call.policy == "writer" else 0)
            # Untrained, the critic's calls still have their share of the return, as the run's rule gives it.
            assert training[call.id].credit == pytest.approx(records.rewards[rollout.id])
            assert (training[call.id].dropped == "untrained_agent") == (call.policy == "critic")
    assert sum(record.weight for record in training.values()) > 0


AGENT = '''
import asyncio
import json
import pathlib

import openai

METRICS = pathlib.Path(__file__).parent / "runs" / "run" / "metrics.jsonl"
WAITS = {"s1-g0-m0": 2, "s1-g1-m0": 6}
"""Which rollouts go on only after which step was trained."""

def trained():
    # The trainer appends meanwhile, and a line may be half there: it is whole once its newline is.
    lines = METRICS.read_text().rpartition("\\n")[0].splitlines() if METRICS.exists() else []
    return max((line["step"] for line in map(json.loads, lines) if line["kind"] == "train"), default=0)

async def solve(task_input, context):
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key)

    async def ask(text):
        reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    first = await ask(task_input)
    while trained() < WAITS.get(context.rollout, 0):
        await asyncio.sleep(0.02)
    return await ask(first or "nothing")
'''
STEPS, STALENESS = 8, 4


@pytest.mark.storm
def test_late_rollouts_carry_over_and_span_versions_and_those_too_old_are_dropped(agl: Any, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "policies": {"default": {"model": {"path": "policy"}, "optimizer": {"learning_rate": 1e-3}}},
        "async": {"max_staleness": STALENESS},
        "algorithm": {"name": "grpo", "grpo": {"beta": 0.0, "importance_cap": 2.0}},
    }
    output = agl.run("train", write_run(tmp_path, AGENT, STEPS, **sections))
    run = tmp_path / "runs" / "run"
    records = recorded(run, Mode.TRAIN)
    rollouts, calls, training_records = records.rollouts, records.calls, records.training

    assert "caution" not in output
    assert len(rollouts) == STEPS * 2 * 4
    assert all(rollout.state is RolloutState.DONE for rollout in rollouts.values())
    assert {(a.error, a.ending) for tried in records.attempts.values() for a in tried} == {(None, Ending.FINISHED)}
    versions = {id: [call.version or 0 for call in calls[id]] for id in rollouts}
    assert all(len(numbers) == 2 and numbers == sorted(numbers) for numbers in versions.values())
    # The update that a rollout was used in made version `step`; it began with the one before.
    ages = {id: rollout.step - 1 - versions[id][0] for id, rollout in rollouts.items()}

    # It was late: begun for step 1, answered by two versions, and trained on.
    assert versions["s1-g0-m0"][0] == 0
    assert versions["s1-g0-m0"][1] >= 2
    assert 2 < rollouts["s1-g0-m0"].step <= 1 + STALENESS
    # It was later than that.
    assert ages["s1-g1-m0"] > STALENESS
    stale = {id for id in rollouts if any(record.dropped == "stale" for record in training_records[id])}
    assert stale == {id for id, age in ages.items() if age > STALENESS}
    assert stale >= {"s1-g1-m0", "s1-g1-m1", "s1-g1-m2", "s1-g1-m3"}
    assert all(len(training_records[id]) == 2 for id in rollouts), "every call was trained on or has its reason"
    assert all(record.weight > 0 for record in training_records["s1-g0-m0"])

    steps = [line for line in agl.metrics("run") if line["kind"] == "train"]
    assert sum(line.get("episodes_dropped/stale", 0) for line in steps) == len(stale)
    assert max(line["staleness/max"] for line in steps) == max(ages.values())
    assert sum(line["groups/carried_over"] for line in steps) > 0
    assert all("update/importance_mean" in line for line in steps)

    evaluated = recorded(run, Mode.EVAL_SAMPLED).calls
    at = {id: {call.version for call in calls} for id, calls in evaluated.items()}
    assert {id: {int(id.split("-")[0][1:])} for id in at} == at, "weights do not move during an evaluation"
    assert all(one.started <= other.started for sampled in calls.values() for one, other in pairwise(sampled))


LORA = ("policies.default.model.lora.rank=4", "policies.default.optimizer.learning_rate=1e-2")
SMALL = ("train.steps=2", "train.groups_per_step=4", "train.group_size=16", "eval.every=1", "eval.tasks=3")


def calls_of(run: Path, step: int) -> list[Call]:
    """The calls of the evaluation after this step, sampled by the weights of its checkpoint."""
    return [call for calls in recorded(run, Mode.EVAL_SAMPLED, step).calls.values() for call in calls]


@torch.no_grad()
def difference(model: Any, calls: list[Call]) -> float:
    """The largest difference between recorded log-probabilities and those of this model."""
    largest = 0.0
    for call in calls:
        (choice,) = call.choices
        assert call.prompt_ids is not None
        assert choice.response_ids is not None
        assert choice.logprobs is not None
        ids = torch.from_numpy(np.concatenate([call.prompt_ids, choice.response_ids]).astype(np.int64))
        start = len(call.prompt_ids)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)[start - 1 : -1]
        sampled = logprobs.gather(-1, ids[start:, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(sampled - choice.logprobs).max()))
    return largest


@pytest.mark.storm
def test_from_a_run_to_a_served_policy(agl: Any) -> None:
    agl.run(*agl.calc("name=tuned", "train.keep_checkpoints=9", *SMALL, *LORA))
    runs = agl.folder / "runs"
    agl.run("policy", "export", "tuned@2", "--out", agl.folder / "exported")
    calls = calls_of(runs / "tuned", step=2)
    assert len(calls) >= 6
    assert {call.version for call in calls} == {2}
    exported = AutoPeftModelForCausalLM.from_pretrained(agl.folder / "exported")
    assert difference(exported, calls) < 1e-4
    assert difference(exported, calls_of(runs / "tuned", step=1)) > 1e-3, "another version says something else"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(agl.folder / "exported")
    assert "Hi" in str(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))
    assert "tuned@2" in (agl.folder / "exported" / "README.md").read_text()

    serving = agl.start("policy", "serve", "tuned", "tuned@1", "--port=0")
    serving.until(lambda: "try: curl" in serving.output())
    url = serving.output().partition("serving at ")[2].split("/v1")[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    for name in ("tuned", "tuned@1"):
        reply = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "What is 12 plus 3?"}], max_tokens=30
        )
        assert reply.choices[0].message.content
    client.close()
    serving.process.send_signal(signal.SIGINT)
    assert serving.wait(60) == 0, serving.output()

    # Without its engine it ends, and says so, instead of refusing every call.
    serving = agl.start("policy", "serve", "tuned@1", "--port=0")
    serving.until(lambda: "try: curl" in serving.output())
    for engine in psutil.Process(serving.process.pid).children():
        engine.kill()
    assert serving.wait(60) == 2
    assert "The engine was lost" in serving.output()

    compared = agl.run("eval", "tuned@2", "--against=tuned@0", "--repeat=3", "--json", "--set=eval.tasks=2")
    evaluated = json.loads(compared[compared.index("\n{") + 1 :])
    assert {len(score["rewards"]) for score in evaluated["scores"] if score["mode"] == "sampled"} == {3}
    assert {estimate["k"] for estimate in evaluated["passes"]} == {1, 2, 3}
    assert evaluated["against"]["checkpoint"] is None
    assert {(difference["set"], difference["mode"], difference["tasks"]) for difference in evaluated["comparison"]} == {
        (name, mode, 2) for name in ("eval", "eval_templates") for mode in ("greedy", "sampled")
    }
