"""A trained policy that leaves its run, as a user would."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from testing_aids import read_store
from transformers import PreTrainedTokenizerFast

from agl_core.types import Call, Mode

LORA = ("policies.default.model.lora.rank=4", "policies.default.optimizer.learning_rate=1e-2")
SMALL = ("train.steps=2", "train.groups_per_step=4", "train.group_size=16", "eval.every=1", "eval.tasks=3")


def calls_of(run: Path, step: int) -> list[Call]:
    """The calls of the evaluation after this step, sampled by the weights of its checkpoint."""
    recorded = read_store(run / "store.sqlite")
    sampled = {r.id for r in recorded.rollouts if (r.mode, r.step) == (Mode.EVAL_SAMPLED, step)}
    return [call for call in recorded.calls if call.rollout in sampled]


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
