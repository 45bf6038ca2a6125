"""A trained policy leaves its run: exported, merged, served, evaluated, as a user would."""

from __future__ import annotations

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import psutil
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Call, Mode

LORA = ("policies.default.model.lora.rank=4", "policies.default.optimizer.learning_rate=1e-2")
SMALL = ("train.steps=2", "train.groups_per_step=4", "train.group_size=16", "eval.every=1", "eval.tasks=3")


def recorded(run: Path, step: int) -> list[Call]:
    """The calls of the evaluation after this step, sampled by the weights of its checkpoint."""

    async def read() -> list[Call]:
        async with SqliteStore(run / "store.sqlite", read_only=True) as store:
            rollouts = await store.rollouts(step=step, mode=Mode.EVAL_SAMPLED)
            return await store.calls([AttemptKey(each.id, 0) for each in rollouts])

    return asyncio.run(read())


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
        found = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)[start - 1 : -1]
        sampled = found.gather(-1, ids[start:, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(sampled - choice.logprobs).max()))
    return largest


@pytest.mark.storm
def test_from_a_run_to_a_served_policy(agl: Any) -> None:
    agl.run(*agl.calc("name=tuned", "train.keep_checkpoints=9", *SMALL, *LORA))
    runs = agl.folder / "runs"
    listed = json.loads(agl.run("policy", "list", "--json"))
    assert [(each["name"], each["kind"]) for each in listed] == [("tuned@1", "adapter"), ("tuned@2", "adapter")]
    assert all(each["evaluations"] for each in listed)

    for what in ("export", "merge"):
        agl.run("policy", what, "tuned@2", "--out", agl.folder / what)
    calls = recorded(runs / "tuned", step=2)
    assert len(calls) >= 6
    assert {call.version for call in calls} == {2}
    exported = AutoPeftModelForCausalLM.from_pretrained(agl.folder / "export")
    merged = AutoModelForCausalLM.from_pretrained(agl.folder / "merge")
    assert difference(exported, calls) < 1e-4
    assert difference(merged, calls) < 1e-4
    assert difference(merged, recorded(runs / "tuned", step=1)) > 1e-3, "another version says something else"
    for folder in ("export", "merge"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(agl.folder / folder)
        assert "Hi" in str(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))
        assert "tuned@2" in (agl.folder / folder / "README.md").read_text()

    serving = agl.start("policy", "serve", "tuned", "tuned@1", "--port=0")
    serving.until(lambda: "try: curl" in serving.output())
    url = serving.output().partition("serving at ")[2].split("/v1")[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(model: str) -> str:
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": "What is 12 plus 3?"}], max_tokens=30
        )
        assert raw.parse().choices[0].message.content
        return str(raw.headers["x-agl-policy"])

    assert [ask(each) for each in ("tuned", "tuned@latest", "tuned@1")] == ["tuned@2", "tuned@2", "tuned@1"]
    message = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages.create(
        model="tuned@1", max_tokens=30, messages=[{"role": "user", "content": "What is 12 plus 3?"}]
    )
    assert message.usage.output_tokens
    assert client.responses.create(model="tuned@2", input="What is 12 plus 3?").output_text

    # The stable version moves while calls are under way, and none of them fails.
    agl.run("policy", "promote", "tuned@1")
    serving.until(lambda: "tuned@stable is tuned@1" in serving.output())
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, "tuned@stable") for _ in range(40)]
        agl.run("policy", "promote", "tuned@2")
        serving.until(lambda: "tuned@stable is now tuned@2" in serving.output())
        asked += [pool.submit(ask, "tuned@stable") for _ in range(10)]
        answered = [each.result() for each in asked]
    assert set(answered[:10]) == {"tuned@1"}
    assert set(answered[-10:]) == {"tuned@2"}
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

    # A changed base is another one, and what does not fit is refused.
    base = agl.folder / "base"
    weights = merged.state_dict()
    merged.load_state_dict({name: tensor + 0.01 for name, tensor in weights.items()})
    merged.save_pretrained(base)
    tokenizer.save_pretrained(base)
    refused = agl.start("policy", "merge", "tuned@2", "--out", "x", f"--set=policies.default.model.path={base}")
    assert refused.wait() == 2
    assert "was trained on other weights" in refused.output()
    assert not (agl.folder / "x").exists()

    compared = agl.run("eval", "tuned@2", "--against=tuned@0", "--repeat=3", "--json", "--set=eval.tasks=2")
    found = json.loads(compared[compared.index("\n{") + 1 :])
    assert {len(each["rewards"]) for each in found["scores"] if each["mode"] == "sampled"} == {3}
    assert {each["k"] for each in found["passes"]} == {1, 2, 3}
    assert found["against"]["checkpoint"] is None
    assert {(each["set"], each["mode"], each["tasks"]) for each in found["comparison"]} == {
        (name, mode, 2) for name in ("eval", "eval_templates") for mode in ("greedy", "sampled")
    }
