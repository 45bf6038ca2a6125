"""Policies that were saved: serving them without a trainer, merging adapters, and telling whose adapter one is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.training.child import UpdateRequest
from agl_torch.engine import TorchEngine
from agl_torch.loading import fingerprint, load_model
from agl_torch.plugin import TorchOptions
from agl_torch.process import Policies

from .conftest import LORA, make_batch

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9]])
in_one_loop = pytest.mark.asyncio(loop_scope="module")


def trained(folder: Path, spec: PolicySpec, updates: int = 1) -> Path:
    """What a policy saved after some updates; returns the folder with its weights."""
    context = EngineContext(folder, 0, {"default": spec}, False, (), "key")
    policies = Policies(TorchOptions(cache_mib=16, device="cpu"), context)
    for seed in range(updates):
        policies.update(
            UpdateRequest("default", "grpo", {"beta": 0.1}, make_batch(None, seed=seed)), lambda share: None
        )
    policies.save(folder)
    return folder / "default" / "model"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    """Two versions of an adapter, and all weights of another policy."""
    folder, adam = tmp_path_factory.mktemp("saved"), {"learning_rate": 1e-2}
    lora = PolicySpec(str(checkpoint), optimizer=adam, lora=LORA)
    return {
        "one": trained(folder / "one", lora),
        "two": trained(folder / "two", lora, updates=2),
        "full": trained(folder / "full", PolicySpec(str(checkpoint), optimizer=adam)),
    }


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=IDS).logits.double(), -1)


class TestWhoseAdapterItIs:
    def test_a_fingerprint_is_of_the_weights_alone(self, checkpoint: Path, saved: dict[str, Path]) -> None:
        plain = fingerprint(load_model(PolicySpec(str(checkpoint)), CPU, 0).model)

        assert fingerprint(load_model(PolicySpec(str(checkpoint), lora=LORA), CPU, 0).model) == plain
        assert fingerprint(load_model(PolicySpec(str(checkpoint), adapter=str(saved["two"])), CPU, 0).model) == plain
        assert fingerprint(load_model(PolicySpec(str(checkpoint), dtype="bfloat16"), CPU, 0).model) == plain
        assert fingerprint(load_model(PolicySpec(str(saved["full"])), CPU, 0).model) != plain

    def test_an_adapter_of_other_weights_is_refused(self, checkpoint: Path, saved: dict[str, Path]) -> None:
        spec = PolicySpec(str(saved["full"]), adapter=str(saved["one"]), name="full")
        with pytest.raises(EngineError, match=r"trained on other weights than those of 'full'.*fingerprints differ"):
            load_model(spec, CPU, 0)

    def test_a_run_does_not_go_on_with_an_adapter_of_other_weights(
        self, checkpoint: Path, saved: dict[str, Path]
    ) -> None:
        spec = PolicySpec(str(saved["full"]), lora=LORA)
        context = EngineContext(Path("run"), 0, {"default": spec}, False, (), "key")
        policies = Policies(TorchOptions(cache_mib=16, device="cpu"), context)
        with pytest.raises(CheckpointError, match="was trained on other weights"):
            policies.restore(saved["one"].parents[1])


class Running:
    """A started engine without policies."""

    def __init__(self, engine: TorchEngine, upstream: Upstream) -> None:
        self.engine, self.upstream = engine, upstream

    async def ask(self, model: str) -> tuple[list[int], list[int], list[float]]:
        """Ids of prompt and reply, and the log-probabilities of the latter."""
        async with openai.AsyncOpenAI(base_url=self.upstream.urls[0], api_key="sk", max_retries=0) as client:
            raw = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Tom has 5 apples"}],
                max_tokens=20,
                seed=1,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
        reply = raw.model_dump()
        choice = reply["choices"][0]
        content = choice["logprobs"]["content"]
        return reply["prompt_token_ids"], choice["token_ids"], [each["logprob"] for each in content]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    context = EngineContext(tmp_path_factory.mktemp("served"), 0, {}, False, (), "sk")
    engine = TorchEngine(TorchOptions(threads=1, cache_mib=16, device="cpu"), context)
    try:
        upstream = await engine.start()
        assert (dict(upstream.models), upstream.context_length) == ({}, None)
        yield Running(engine, upstream)
    finally:
        await engine.stop()


@in_one_loop
async def test_versions_come_and_go_and_each_answers_by_its_own_weights(
    running: Running, checkpoint: Path, saved: dict[str, Path]
) -> None:
    engine = running.engine
    specs = {
        "run@1": PolicySpec(str(checkpoint), adapter=str(saved["one"])),
        "run@2": PolicySpec(str(checkpoint), adapter=str(saved["two"])),
        "full@1": PolicySpec(str(saved["full"])),
        "run@0": PolicySpec(str(checkpoint)),
    }
    for name, spec in specs.items():
        await engine.publish(name, spec)
    answers = dict(zip(specs, await asyncio.gather(*map(running.ask, specs)), strict=True))

    for name, (prompt, response, recorded) in answers.items():
        model = load_model(specs[name], CPU, 0).model
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            found = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)[len(prompt) - 1 : -1]
        expected = found.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(recorded, expected, atol=1e-4)
    assert len({tuple(logprobs) for _, _, logprobs in answers.values()}) == len(specs)

    asked = [asyncio.ensure_future(running.ask("run@2")) for _ in range(20)]
    await asyncio.sleep(0)
    await engine.withdraw("run@1")
    await asyncio.gather(*asked)
    with pytest.raises(openai.NotFoundError, match="no model 'run@1'"):
        await running.ask("run@1")
    await engine.publish("run@1", specs["run@1"])
    assert (await running.ask("run@1"))[2] == pytest.approx(answers["run@1"][2], abs=1e-4)


@in_one_loop
async def test_mistakes_leave_what_is_served(running: Running, checkpoint: Path, saved: dict[str, Path]) -> None:
    engine = running.engine
    await engine.publish("kept", PolicySpec(str(checkpoint)))
    with pytest.raises(EngineError, match="'kept' is served already"):
        await engine.publish("kept", PolicySpec(str(checkpoint)))
    with pytest.raises(EngineError, match="trained on other weights"):
        await engine.publish("other", PolicySpec(str(saved["full"]), adapter=str(saved["one"])))
    with pytest.raises(EngineError, match="Did you mean 'kept'"):
        await engine.withdraw("keptt")
    assert (await running.ask("kept"))[1]
