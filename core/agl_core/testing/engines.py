"""The contract of every engine (`agl_core.protocols.Engine`), as checks of a real one.

A plugin's tests start their engine once, and run the checks with it in this order (the last one stops it):

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def case(tmp_path_factory):
        folder = tmp_path_factory.mktemp("engine")
        context = engine_context(folder, model="my/tiny-model")
        engine = MyEngine(MyOptions(), context)
        try:
            yield EngineCase(engine, await engine.start(), context, folder)
        finally:
            await engine.stop()

    @pytest.mark.asyncio(loop_scope="module")
    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
    async def test_the_engine_keeps_the_contract(case, check):
        await check(case)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest

from agl_core.capture.requests import HEADER_POLICY
from agl_core.config.sections import OptimizerSection
from agl_core.errors import AglError, EngineError
from agl_core.learning.batch import lay_out
from agl_core.protocols import Engine, EngineContext, PolicySpec, UpdateResult, Upstream
from agl_core.testing import episodes as make
from agl_core.types import Batch, CreditKind, DropReason

ALGORITHM = "conformance"
LEASH = 0.5
PLUGIN = f'''"""REINFORCE against the mean of the batch, in torch alone."""

import agl_core
import torch


@agl_core.algorithm(name="{ALGORITHM}", needs={{agl_core.Capability.TOKEN_IDS, agl_core.Capability.REFERENCE}})
class Conformance:
    """For the conformance suite of engines."""

    minibatches = 1
    needs_critic = needs_entropy = needs_scores = False
    target_kl = None

    def __init__(self, *, leash: float = 0.0, rounds: int = 1):
        self.epochs, self.leash, self.needs_reference = rounds, leash, leash > 0

    def advantages(self, samples, values_R=None):
        centred_N = samples.values_N - samples.values_N.mean()
        return (centred_N[samples.transition_R] * samples.mask_R).to(samples.behaviour_R.dtype)

    def keep(self, samples, advantages_R):
        kept_N = torch.zeros(len(samples.values_N), dtype=torch.bool, device=advantages_R.device)
        kept_N[samples.transition_R[advantages_R != 0]] = True
        return kept_N

    def weights(self, samples):
        return samples.mask_R.to(samples.behaviour_R.dtype) / samples.mask_R.sum().clamp(min=1)

    def loss(self, samples, logprobs, advantages_R, weights_R):
        drift_R = (logprobs.current_R - logprobs.reference_R).square()
        loss_R = self.leash * drift_R - (logprobs.current_R - logprobs.old_R).exp() * advantages_R
        return (weights_R * loss_R).sum(), {{"leash": (weights_R * self.leash).sum()}}
'''
QUESTIONS = ("What is 12 plus 3?", "What is 4 plus 5?", "Hello!", "What is 70 plus 1?")


@dataclass(frozen=True)
class EngineCase:
    """A started engine with one policy, and what it was started with."""

    engine: Engine
    upstream: Upstream
    context: EngineContext
    folder: Path
    """Checkpoints go below it."""
    tolerance: float = 0.0
    """By how much a number may differ, relatively, when the same is computed again."""

    @property
    def policy(self) -> str:
        (name,) = self.context.policies
        return name

    async def version(self) -> int:
        return (await self.engine.versions())[self.policy]

    async def update(self, batch: Batch) -> UpdateResult:
        return await self.engine.update(self.policy, batch)

    async def ask(self, question: str = QUESTIONS[0], **settings: Any) -> httpx.Response:
        body = {
            "model": self.upstream.models[self.policy],
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 12,
            "temperature": 1.0,
            "seed": 1,
            "logprobs": True,
            "return_token_ids": True,
            **settings,
        }
        headers = {"authorization": f"Bearer {self.upstream.api_key}"}
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            return await client.post(f"{self.upstream.urls[0]}/chat/completions", json=body, headers=headers)

    async def sampled(self) -> Batch:
        """A batch of real replies, one group, each with a seed and a value of its own."""
        replies = await asyncio.gather(*(self.ask(question, seed=seed) for seed, question in enumerate(QUESTIONS)))
        rows = [Row.of_reply(reply.json(), value) for value, reply in enumerate(replies)]
        return batch_of(rows, version=await self.version())


@dataclass(frozen=True)
class Row:
    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float]
    value: float
    trained: bool = True
    """True if the response's tokens take part in the loss."""

    @classmethod
    def of_reply(cls, reply: Any, value: float) -> Row:
        """The row that the core makes of a chat completion."""
        choice = reply["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return cls(reply["prompt_token_ids"], choice["token_ids"], logprobs, value)


def batch_of(rows: Sequence[Row], *, version: int = 0, temperature: float = 1.0) -> Batch:
    """One group of rollouts, each with one transition, as the core lays them out."""
    transitions = [
        make.transition(
            rollout=f"rollout-{i}",
            version=version,
            temperature=temperature,
            prompt_ids=row.prompt,
            response_ids=row.response,
            logprobs=row.logprobs,
            mask=np.full(len(row.response), row.trained),
        )
        for i, row in enumerate(rows)
    ]
    values, places = [row.value for row in rows], range(len(rows))
    return lay_out(transitions, values, [0] * len(rows), places, CreditKind.RETURN)


def engine_context(folder: Path, model: str, **changes: Any) -> EngineContext:
    """One policy, trained by the algorithm of a plugin file in `folder`; `changes` are of the policy."""
    plugin = folder / "conformance_algorithm.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    spec = PolicySpec(
        model=model,
        optimizer=OptimizerSection(learning_rate=1e-3),
        algorithm=ALGORITHM,
        algorithm_options={"leash": LEASH, "rounds": 2},
    )
    return EngineContext(
        run_dir=folder / "run",
        seed=1,
        policies={"default": replace(spec, **changes)},
        deterministic=False,
        plugin_files=(plugin,),
        api_key="the-key",
        steps=10,
    )


async def check_replies_carry_ids_logprobs_and_their_version(case: EngineCase) -> None:
    reply = await case.ask()
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER_POLICY] == str(await case.version())
    row = Row.of_reply(reply.json(), 0.0)
    assert len(row.prompt) > 0
    assert 0 < len(row.response) == len(row.logprobs) <= 12
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.logprobs)
    assert case.upstream.returns_ids


async def check_model_calls_need_the_key(case: EngineCase) -> None:
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        reply = await client.post(f"{case.upstream.urls[0]}/chat/completions", json={})
    assert reply.status_code == 401


async def check_an_update_makes_the_next_version_which_is_served(case: EngineCase) -> None:
    before, batch = await case.version(), await case.sampled()
    shares: list[float] = []
    result = await case.engine.update(case.policy, batch, shares.append)
    assert result.version == before + 1 == await case.version()
    assert (await case.ask()).headers[HEADER_POLICY] == str(before + 1)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert all(math.isfinite(value) for value in result.metrics.values())


async def check_the_algorithm_is_the_users_own(case: EngineCase) -> None:
    """With its settings and the reference that it needs, though they have names that no engine knows."""
    batch = await case.sampled()
    result = await case.update(batch)
    assert math.isclose(result.metrics["leash"], LEASH, rel_tol=1e-4)
    expected_N = batch.values_N - batch.values_N.mean()
    np.testing.assert_allclose(result.advantage_N, expected_N, atol=1e-5)
    np.testing.assert_allclose(result.weight_N, batch.response_lengths_N / batch.mask_R.size, atol=1e-5)


async def check_training_computes_the_log_probabilities_that_were_sampled(case: EngineCase) -> None:
    batch = await case.sampled()
    result = await case.update(batch)
    computed = [logprobs for logprobs in result.logprobs_N if logprobs is not None]
    assert list(map(len, computed)) == batch.response_lengths_N.tolist()
    tolerance = 0.5 if result.precision == "bfloat16" else 1e-3  # As certificates allow (docs/exactness.md).
    np.testing.assert_allclose(np.concatenate(computed), batch.behaviour_logprobs_R, rtol=0, atol=tolerance)


async def check_what_cannot_be_trained_on_is_dropped_with_its_reason(case: EngineCase) -> None:
    replies = [Row.of_reply((await case.ask(question)).json(), value) for value, question in enumerate(QUESTIONS)]
    good = replies[0]
    limit = case.upstream.context_length
    bad: dict[DropReason, Row] = {
        DropReason.EMPTY_RESPONSE: replace(good, response=(), logprobs=()),
        DropReason.NON_FINITE: replace(good, logprobs=[math.nan, *good.logprobs[1:]]),
        DropReason.FULLY_MASKED: replace(good, trained=False),
    }
    if limit is not None:
        bad[DropReason.TOO_LONG] = replace(good, prompt=[*good.prompt, *(good.prompt[0] for _ in range(limit))])
    result = await case.update(batch_of([*replies, *bad.values()]))
    assert result.dropped[-len(bad) :] == tuple(bad)
    assert not result.weight_N[-len(bad) :].any()
    assert result.dropped[0] is None
    assert result.weight_N[0] > 0


async def check_a_batch_with_nothing_to_train_on_makes_a_version_too(case: EngineCase) -> None:
    """Otherwise what is sampled next would be older than the run thinks."""
    before, batch = await case.version(), await case.sampled()
    result = await case.update(replace(batch, values_N=np.ones(len(batch))))
    assert result.version == before + 1
    assert result.dropped == (DropReason.NO_ADVANTAGE,) * len(batch)
    assert not result.weight_N.any()
    assert (await case.ask()).headers[HEADER_POLICY] == str(before + 1)


async def check_a_checkpoint_restores_weights_optimizer_and_version(case: EngineCase) -> None:
    batch, checkpoint = await case.sampled(), case.folder / "checkpoint"
    await case.engine.save(checkpoint)
    saved = await case.version()
    first = await case.update(batch)
    greedy = Row.of_reply((await case.ask(temperature=0)).json(), 0.0)
    await case.update(batch)
    await case.engine.load(checkpoint)
    assert await case.version() == saved
    assert (await case.ask()).headers[HEADER_POLICY] == str(saved)
    again = await case.update(batch)
    assert again.version == first.version
    for name in {"loss", "grad_norm"} & first.metrics.keys():
        assert math.isclose(again.metrics[name], first.metrics[name], rel_tol=case.tolerance), name
    row = Row.of_reply((await case.ask(temperature=0)).json(), 0.0)
    assert row.response == greedy.response
    np.testing.assert_allclose(row.logprobs, greedy.logprobs, rtol=case.tolerance, atol=case.tolerance)


async def check_an_update_runs_on_when_its_caller_gives_up(case: EngineCase) -> None:
    before, batch = await case.version(), await case.sampled()
    update = asyncio.create_task(case.update(batch))
    await asyncio.sleep(0)  # The batch is handed on before anything is waited for.
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    await case.engine.save(case.folder / "later")  # It comes after the update.
    assert await case.version() == before + 1


async def check_a_mistake_is_an_error_and_the_engine_goes_on(case: EngineCase) -> None:
    before, batch = await case.version(), await case.sampled()
    with pytest.raises(AglError, match=case.policy):
        await case.engine.update(f"{case.policy}s", batch)
    with pytest.raises(AglError, match="nowhere"):
        await case.engine.load(case.folder / "nowhere")
    assert await case.version() == before
    assert (await case.update(batch)).version == before + 1


async def check_tokens_are_counted(case: EngineCase) -> None:
    before = await case.engine.stats()
    row = Row.of_reply((await case.ask("What is 8 plus 21?")).json(), 0.0)
    after = await case.engine.stats()
    grown = {name: after[name] - before[name] for name in ("tokens_prefilled", "tokens_reused", "tokens_decoded")}
    assert grown["tokens_decoded"] == len(row.response)
    assert grown["tokens_prefilled"] + grown["tokens_reused"] >= len(row.prompt)


async def check_it_starts_once_and_stops_for_good(case: EngineCase) -> None:
    """The last one: nothing works after it."""
    with pytest.raises(EngineError, match="already"):
        await case.engine.start()
    assert (await case.ask()).status_code == 200
    await case.engine.stop()
    await case.engine.stop()
    with pytest.raises(EngineError, match="not running"):
        await case.engine.versions()


EngineCheck: TypeAlias = Callable[[EngineCase], Awaitable[None]]
ENGINE_CHECKS: tuple[EngineCheck, ...] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
