"""Two updates through Ray, TransferQueue and two training workers are those of the torch engine, with every algorithm.

`live_parity.py` compares more of them in one process. One of the engines here serves with a replica of two workers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.wire.headers import HEADER_POLICY
from agl_torch.loading import LoadedModel, load_model
from agl_verl.engine import VerlEngine
from agl_verl.plugin import VerlOptions

from . import parity, verl_bench
from .recorded import TOO_LONG

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Case:
    """An algorithm, and how many workers one serving replica has."""

    algorithm: str
    options: Mapping[str, Any]
    tensor_parallel: int = 1


CASES = {
    "PPO": Case("ppo", {"critic_learning_rate": 1e-3, "lam": 0.9, "minibatches": 2}),
    "REINFORCE++, served by two": Case("reinforce++", {"minibatches": 2}, tensor_parallel=2),
    "GRPO with a reference": Case("grpo", {"beta": 0.001, "minibatches": 2}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(case: Case, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[VerlEngine, Upstream]]:
    spec = PolicySpec(
        model=str(POLICY),
        dtype="float32",
        optimizer=verl_bench.optimizer().model_dump(),
        algorithm=case.algorithm,
        algorithm_options=dict(case.options),
    )
    options = VerlOptions(
        device="cpu",
        gpus_per_node=2,
        tensor_parallel=case.tensor_parallel,
        gradient_checkpointing=False,
        max_context=TOO_LONG,
        tokens_per_micro_batch=512,
    )
    folder = tmp_path_factory.mktemp("run")
    context = EngineContext(folder, 0, {"default": spec}, False, (), "key", verl_bench.TRAINING_STEPS)
    made = VerlEngine(options, context)
    upstream = await made.start()
    try:
        yield made, upstream
    finally:
        await made.stop()


async def test_two_updates_are_those_of_the_torch_engine_and_are_served(
    engine: tuple[VerlEngine, Upstream], case: Case, tmp_path: Path
) -> None:
    made, upstream = engine
    by_torch = verl_bench.TorchBench(POLICY, case.algorithm, case.options)
    weights = loaded(POLICY)
    for number, step in enumerate(parity.STEPS):
        await check_served(upstream, weights, version=number)
        batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=number, step=step)
        expected = by_torch.update(batch)
        shares: list[float] = []
        result = await made.update("default", batch, case.algorithm, dict(case.options), shares.append)
        assert result.version == number + 1
        assert shares == sorted(shares)
        assert len(shares) > 2, "also before the end"
        folder = tmp_path / str(number)
        await made.save(folder)
        after = loaded(folder / "default" / "model")
        found = verl_bench.Made(
            result.advantage_N,
            result.weight_N,
            result.dropped,
            result.metrics["loss"],
            result.metrics.get("value_loss"),
            flat(after) - flat(weights),
            None,
        )
        distance = parity.compared(expected, found)
        assert distance.within, distance
        weights = after
    await check_served(upstream, weights, version=len(parity.STEPS))


async def check_served(upstream: Upstream, weights: LoadedModel, version: int) -> None:
    """The log-probabilities of replies, one of each server, are those of the weights."""
    for url in upstream.urls:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "What is 12 plus 3?"}],
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": True,
            "return_token_ids": True,
        }
        headers = {"authorization": f"Bearer {upstream.api_key}"}
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            reply = await client.post(f"{url}/chat/completions", json=body, headers=headers)
        assert reply.headers[HEADER_POLICY] == str(version), reply.text
        [choice], prompt = reply.json()["choices"], reply.json()["prompt_token_ids"]
        response = torch.tensor(choice["token_ids"])
        with torch.no_grad():
            whole = torch.cat([torch.tensor(prompt), response])[None]
            logits = weights.model(whole).logits[0, len(prompt) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        told = [each["logprob"] for each in choice["logprobs"]["content"]]
        torch.testing.assert_close(torch.tensor(told), own, rtol=0, atol=1e-5)


def loaded(folder: Path) -> LoadedModel:
    return load_model(PolicySpec(model=str(folder), dtype="float32"), torch.device("cpu"), 0)


def flat(policy: LoadedModel) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.model.parameters()])
