"""The same batch makes the same update here and under the torch engine, of the same adapter; policies stay apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
import pytest_asyncio

from agl_core.testing.engines import QUESTIONS, Row, batch_of
from tests.support.engine_parity import Case, compared

from . import parity
from .parity import ADAM, FROZEN, GRADIENT_CASES, POSSIBLE, Served, TorchAdapter, flat, policy_of, serve
from .skyrl_tx import SkyrlTx

CURVE = "calc"
CALC = Case("grpo", {"epochs": 2})
"""As in examples/calc/train.toml."""
SAMPLES = 4
CURVE_STEPS = 5
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(server: SkyrlTx, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serve(server, tmp_path_factory.mktemp("parity"), {**POSSIBLE, CURVE: CALC}, ADAM) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gradients(server: SkyrlTx, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with parity.serve_gradients(server, tmp_path_factory.mktemp("gradients")) as served:
        yield served


async def ask(served: Served, policy: str, question: str = QUESTIONS[0], seed: int = 1) -> Row:
    body = {
        "model": served.upstream.models[policy],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 12,
        "seed": seed,
        "logprobs": True,
        "return_token_ids": True,
    }
    headers = {"authorization": f"Bearer {served.upstream.api_key}"}
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        reply = await client.post(f"{served.upstream.urls[0]}/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return Row.of_reply(reply.json(), 0.0)


@pytest.mark.parametrize("name", POSSIBLE)
async def test_both_engines_make_the_same_update(served: Served, name: str) -> None:
    distance = await parity.distance(served, name)
    assert distance.within, distance


@pytest.mark.parametrize("name", GRADIENT_CASES)
async def test_both_engines_have_the_same_gradient(gradients: Served, name: str) -> None:
    """An optimizer step that is the gradient times a number shows its size too, which Adam takes out."""
    for by_torch, by_tinker in await parity.updates(gradients, name):
        difference = (by_tinker.change - by_torch.change).norm() / by_torch.change.norm()
        assert difference < 1e-4


async def test_policies_are_adapters_that_do_not_move_each_other(served: Served) -> None:
    """Two are trained, in turns; a third one is not, and samples as before."""
    one, other = map(policy_of, list(POSSIBLE)[:2])
    start = {policy: flat(served.adapter(policy)) for policy in (one, other)}
    assert not np.allclose(start[one], start[other])
    replies = {policy: await ask(served, policy) for policy in (one, other, FROZEN)}
    before = await served.engine.versions()
    batch = batch_of([replace(await ask(served, one, question), value=n) for n, question in enumerate(QUESTIONS)])
    await served.update(one, batch)
    assert await served.engine.versions() == before | {one: before[one] + 1}
    assert (flat(served.adapter(other)) == start[other]).all()
    again = {policy: await ask(served, policy) for policy in (one, other, FROZEN)}
    assert again[one] != replies[one]
    assert (again[other], again[FROZEN]) == (replies[other], replies[FROZEN])


async def test_calcs_curve_is_that_of_the_torch_engine_for_five_steps(served: Served) -> None:
    """Each step both engines train on what the service samples; the reward is the share of even tokens."""
    by_torch, made = TorchAdapter(served, CURVE), []
    for step in range(CURVE_STEPS):
        rows = [await ask(served, CURVE, question, seed) for question in QUESTIONS for seed in range(SAMPLES)]
        rows = [replace(row, value=float(np.mean(np.array(row.response) % 2 == 0))) for row in rows]
        batch = batch_of(rows, version=step)
        made.append((by_torch.update(batch), await served.update(CURVE, batch)))
    # Ten times what was measured: 1e-6 and 5e-7. Adam makes a sign of a tiny gradient, so the cosine was 1 - 5e-5.
    distance = compared(*made)
    assert distance.logprobs < 1e-5, distance
    assert max(distance.metrics, distance.loss, distance.advantages) < 5e-6, distance
    assert distance.cosine > 0.9995, distance
