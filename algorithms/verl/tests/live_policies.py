"""Two policies on one base: served by their names, and trained without a trace in each other. Ray, veRL and vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from agl_core.capture.requests import HEADER_POLICY
from agl_core.protocols import PolicySpec, Upstream
from agl_torch.loading import LoadedModel, load_model
from agl_verl.plugin import VerlEngine

from . import parity, verl_bench
from .live_engine import CPU_WEIGHTS, POLICY, ask, own_logprobs, started, told_logprobs

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "solver": ("grpo", {"beta": 0.001, "minibatches": 2}),
    "checker": ("ppo", {"critic_learning_rate": 1e-3, "lam": 0.9}),
}
RATES = {"solver": 2e-2, "checker": 1e-2}
WORKERS: dict[str, dict[str, Any]] = {
    "one worker": {"gpus_per_node": 1},
    "two workers, offloaded": {"gpus_per_node": 2, "offload": True},
    "a server of its own": {"gpus_per_node": 1, "serving_gpus": 1, "overrides": CPU_WEIGHTS},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WORKERS.values(), ids=WORKERS)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[VerlEngine, Upstream]]:
    policies = {
        name: PolicySpec(
            model=str(POLICY),
            dtype="float32",
            lora={"rank": 8, "alpha": 16.0},
            optimizer={"learning_rate": RATES[name]},
            algorithm=algorithm,
            algorithm_options=options,
        )
        for name, (algorithm, options) in ALGORITHMS.items()
    }
    async with started(tmp_path_factory.mktemp("run"), policies, request.param) as engine:
        yield engine


async def update(engine: VerlEngine, policy: str, seed: int) -> Any:
    batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=seed)
    return await engine.update(policy, batch)


async def adapters(engine: VerlEngine, folder: Path) -> dict[str, LoadedModel]:
    """Every policy as the checkpoint in this new folder has it."""
    await engine.save(folder)
    (shard,) = (folder / "solver" / "verl" / "actor").glob("model_*rank_0.pt")
    assert all(".lora_" in name for name in torch.load(shard, weights_only=False)), "the base is not saved with each"
    return {
        name: load_model(
            PolicySpec(str(POLICY), "float32", adapter=str(folder / name / "model")), torch.device("cpu"), 0
        )
        for name in ALGORITHMS
    }


def weights(model: LoadedModel) -> torch.Tensor:
    return verl_bench.flat(weight for name, weight in model.model.named_parameters() if ".lora_" in name)


async def check_served(upstream: Upstream, models: dict[str, LoadedModel], **versions: int) -> dict[str, Any]:
    """Each policy's replies are of its own adapter and version; those of the last server."""
    replies = {}
    for url in upstream.urls:
        for name, version in versions.items():
            reply = await ask(Upstream((url,), {}, upstream.api_key), model=name, max_tokens=24, temperature=1, seed=5)
            assert reply.status_code == 200, reply.text
            assert reply.headers[HEADER_POLICY] == str(version)
            assert reply.json()["model"] == name
            assert told_logprobs(reply.json()) == pytest.approx(own_logprobs(models[name], reply.json()), abs=1e-5)
            replies[name] = reply.json()
    return replies


async def test_each_policy_learns_and_is_served_by_itself(engine: tuple[VerlEngine, Upstream], tmp_path: Path) -> None:
    served, upstream = engine
    first = await adapters(served, tmp_path / "0")
    await check_served(upstream, first, solver=0, checker=0)

    result = await update(served, "solver", 1)
    assert (result.version, result.metrics["learning_rate"]) == (1, RATES["solver"])
    second = await adapters(served, tmp_path / "1")
    assert torch.equal(weights(second["checker"]), weights(first["checker"])), "an update of the other policy"
    assert not torch.equal(weights(second["solver"]), weights(first["solver"]))
    replies = await check_served(upstream, second, solver=1, checker=0)
    assert told_logprobs(replies["solver"]) != pytest.approx(
        own_logprobs(second["checker"], replies["solver"]), abs=1e-4
    )

    result = await update(served, "checker", 2)
    assert (result.version, result.metrics["learning_rate"]) == (1, RATES["checker"])
    assert "value_loss" in result.metrics
    third = await adapters(served, tmp_path / "2")
    assert torch.equal(weights(third["solver"]), weights(second["solver"]))
    await check_served(upstream, third, solver=1, checker=1)

    assert (await update(served, "solver", 3)).version == 2
    fourth = await adapters(served, tmp_path / "3")
    await check_served(upstream, fourth, solver=2, checker=1)


async def test_what_is_restored_goes_on_with_its_own_optimizer(
    engine: tuple[VerlEngine, Upstream], tmp_path: Path
) -> None:
    """The same update after the same checkpoint, once with an update of the other policy in between."""
    served, upstream = engine
    before = await adapters(served, tmp_path / "0")
    versions = dict(await served.versions())
    ended = []
    for between in (False, True):
        await served.load(tmp_path / "0")
        assert await served.versions() == versions
        await check_served(upstream, before, **versions)
        if between:
            await update(served, "checker", 4)
        await update(served, "solver", 5)
        ended.append(await adapters(served, tmp_path / f"after-{between}"))
    torch.testing.assert_close(weights(ended[1]["solver"]), weights(ended[0]["solver"]), rtol=0, atol=1e-7)
    assert torch.equal(weights(ended[0]["checker"]), weights(before["checker"]))
    assert not torch.equal(weights(ended[1]["checker"]), weights(before["checker"]))
