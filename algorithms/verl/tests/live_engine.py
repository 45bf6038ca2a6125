"""The whole engine on a CPU: Ray, veRL's trainer and workers, vLLM.

It is started once for what every engine must honour, and once for each case. In each the tests follow each other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import torch

from agl_core.apis.streamed import StreamedCompletion
from agl_core.capture.requests import HEADER_POLICY
from agl_core.config.sections import OptimizerSection
from agl_core.errors import EngineError
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, engine_context
from agl_torch.loading import LoadedModel, load_model
from agl_torch.process import save_policy
from agl_torch.trainer import PolicyTrainer
from agl_verl.config import ChosenAlgorithm
from agl_verl.options import VerlOptions
from agl_verl.plugin import VerlEngine
from tests.support.recorded_batches import TOO_LONG

from . import parity, verl_bench

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
OPTIONS: dict[str, Any] = {"beta": 0, "minibatches": 2}
CPU_WEIGHTS = tuple(
    f"actor_rollout_ref.rollout.checkpoint_engine.{setting}"
    for setting in ("backend=agl_cpu", "custom_backend_module=cpu_weights")
)
"""How weights get to a server of its own here (`cpu_weights.py`, which has to be on PYTHONPATH)."""
QUESTION = [{"role": "user", "content": "What is 12 plus 3?"}]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contract(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("case")
    context = engine_context(folder, str(POLICY), dtype="float32")
    engine = VerlEngine(VerlOptions(device="cpu", gradient_checkpointing=False, max_context=512), context)
    try:
        yield EngineCase(engine, await engine.start(), context, folder, tolerance=1e-4)
    finally:
        await engine.stop()


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(contract: EngineCase, check: EngineCheck) -> None:
    await check(contract)


def loaded(folder: Path) -> LoadedModel:
    return load_model(PolicySpec(model=str(folder), dtype="float32"), torch.device("cpu"), 0)


def weights(folder: Path) -> torch.Tensor:
    return verl_bench.flat(loaded(folder).model.parameters())


@pytest.fixture(scope="module")
def trained_by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the torch engine, after an update."""
    folder = tmp_path_factory.mktemp("torch") / "default"
    policy = loaded(POLICY)
    trainer = PolicyTrainer(policy, OptimizerSection(learning_rate=1e-3), tokens_per_micro_batch=4096)
    trainer.update(
        verl_bench.recorded_batch(parity.VOCABULARY, seed=7), ChosenAlgorithm.of("grpo", {"beta": 0}).build()
    )
    save_policy(folder, policy, trainer)
    return folder / "model"


@dataclass(frozen=True)
class Case:
    """An algorithm, and who trains and serves."""

    algorithm: str
    options: Mapping[str, Any]
    workers: Mapping[str, Any]
    """Settings of the engine."""


CASES = {
    "GRPO with a reference, one worker": Case("grpo", {"beta": 0.001, "minibatches": 2}, {"gpus_per_node": 1}),
    "PPO, two workers": Case("ppo", {"critic_learning_rate": 1e-3, "lam": 0.9, "minibatches": 2}, {"gpus_per_node": 2}),
    "REINFORCE++, a server of two workers": Case(
        "reinforce++", {"importance_cap": 2.0}, {"gpus_per_node": 2, "tensor_parallel": 2}
    ),
    "GRPO, a server of its own": Case(
        "grpo", OPTIONS, {"gpus_per_node": 1, "serving_gpus": 1, "overrides": CPU_WEIGHTS}
    ),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    case: Case, trained_by_torch: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[VerlEngine, Upstream]]:
    spec = PolicySpec(
        model=str(trained_by_torch),
        dtype="float32",
        optimizer=verl_bench.optimizer().model_dump(),
        algorithm=case.algorithm,
        algorithm_options=dict(case.options),
    )
    async with started(tmp_path_factory.mktemp("run"), {"default": spec}, case.workers) as engine:
        yield engine


@asynccontextmanager
async def started(
    run_dir: Path, policies: Mapping[str, PolicySpec], workers: Mapping[str, Any]
) -> AsyncIterator[tuple[VerlEngine, Upstream]]:
    shared = {"gradient_checkpointing": False, "max_context": 512, "tokens_per_micro_batch": TOO_LONG}
    context = EngineContext(run_dir, 0, policies, False, (), "the-key", verl_bench.TRAINING_STEPS)
    served = VerlEngine(VerlOptions(device="cpu", **shared, **workers), context)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parent))
        upstream = await served.start()
    try:
        yield served, upstream
    finally:
        await served.stop()


async def ask(upstream: Upstream, **settings: Any) -> httpx.Response:
    body = {
        "model": "default",
        "messages": QUESTION,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
        **settings,
    }
    headers = {"authorization": f"Bearer {upstream.api_key}"}
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        return await client.post(f"{upstream.urls[0]}/chat/completions", json=body, headers=headers)


def told_logprobs(reply: dict[str, Any]) -> list[float]:
    """vLLM's log-probabilities of its reply."""
    return [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]


def own_logprobs(model: LoadedModel, reply: dict[str, Any], banned: Sequence[int] = ()) -> list[float]:
    """The log-probabilities of the torch engine's model, without the `banned` tokens."""
    prompt, response = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
    with torch.no_grad():
        logits = model.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    logits[:, list(banned)] -= 100
    chosen = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
    return [float(logprob) for logprob in chosen]


async def test_a_checkpoint_of_the_torch_engine_is_served(
    engine: tuple[VerlEngine, Upstream], trained_by_torch: Path
) -> None:
    _, upstream = engine
    assert upstream.context_length == 512
    reply = await ask(upstream)
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER_POLICY] == "0"
    reported = told_logprobs(reply.json())
    assert reported == pytest.approx(own_logprobs(loaded(trained_by_torch), reply.json()), abs=1e-4)
    async with httpx.AsyncClient(trust_env=False) as client:
        server = upstream.urls[0].removesuffix("/v1")
        for route, status in {"/v1/chat/completions": 401, "/invocations": 404, "/tokenize": 404}.items():
            assert (await client.post(f"{server}{route}", json={})).status_code == status
        assert (await client.get(f"{server}/health")).status_code == 200


async def check_served(upstream: Upstream, folder: Path, version: int) -> None:
    """The log-probabilities of replies, one of each server, are those of the weights."""
    for url in upstream.urls:
        reply = await ask(replace(upstream, urls=(url,)))
        assert reply.headers[HEADER_POLICY] == str(version), reply.text
        assert told_logprobs(reply.json()) == pytest.approx(own_logprobs(loaded(folder), reply.json()), abs=1e-5)


async def test_two_updates_are_those_of_the_torch_engine_also_from_a_checkpoint(
    engine: tuple[VerlEngine, Upstream], case: Case, trained_by_torch: Path, tmp_path: Path
) -> None:
    served, upstream = engine
    by_torch = verl_bench.TorchBench(trained_by_torch, case.algorithm, case.options)
    saved = [trained_by_torch]
    for number, step in enumerate(parity.STEPS):
        batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=number, step=step)
        expected = by_torch.update(batch)
        shares: list[float] = []
        result = await served.update("default", batch, shares.append)
        assert result.version == number + 1
        assert shares == sorted(shares)
        assert len(shares) > 2, "also before the end"
        await served.save(tmp_path / str(number))
        saved.append(tmp_path / str(number) / "default" / "model")
        by_verl = verl_bench.Made(result, weights(saved[-1]) - weights(saved[-2]))
        distance = parity.compared((expected, by_verl))
        assert distance.within, distance
        await check_served(upstream, saved[-1], version=number + 1)
    await served.load(tmp_path / "0")
    assert (await served.versions())["default"] == 1
    await check_served(upstream, saved[1], version=1)
    again = await served.update("default", batch)
    assert again.version == result.version
    assert again.metrics["grad_norm"] == pytest.approx(result.metrics["grad_norm"], rel=1e-4)
    await check_served(upstream, saved[2], version=2)


async def test_what_is_asked_during_an_update_is_answered_whole_by_one_version(
    engine: tuple[VerlEngine, Upstream], case: Case, tmp_path: Path
) -> None:
    """Servers of their own answer while weights are trained; those that share the workers afterwards."""
    served, upstream = engine
    before = (await served.versions())["default"]
    await served.save(tmp_path / str(before))
    batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=4, rollouts=90)
    update = asyncio.create_task(served.update("default", batch))
    ends = sorted(loaded(tmp_path / str(before) / "default" / "model").eos_ids)
    long = [asyncio.create_task(long_replies(upstream, update, ends, stream)) for stream in (False, True)]
    short: list[tuple[float, float, httpx.Response]] = []
    while not update.done():
        begin = time.monotonic()
        reply = await ask(upstream)
        short.append((begin, time.monotonic(), reply))
    ended, result = time.monotonic(), await update
    await served.save(tmp_path / str(before + 1))

    # What came after the exchange is counted to it, so both are a little late; a reply of the version before is not.
    exchanged = ended - result.metrics["seconds_update_weights"]
    begun = exchanged - result.metrics["seconds_update_actor"]
    versions = [reply.headers[HEADER_POLICY] for _, _, reply in short]
    assert versions == sorted(versions)
    meanwhile = [
        version
        for version, (begin, answered, _) in zip(versions, short, strict=True)
        if version == str(before) and begun < begin and answered < exchanged
    ]
    assert bool(meanwhile) is ("serving_gpus" in case.workers), (begun, exchanged, ended, [r[:2] for r in short])

    whole = [reply for replies in await asyncio.gather(*long) for reply in replies]
    assert {len(reply.json()["choices"][0]["token_ids"]) for reply in whole} == {200}, "whole, not aborted"
    replies = [*whole, *(reply for _, _, reply in short)]
    assert {str(before + 1)} <= {reply.headers[HEADER_POLICY] for reply in replies} <= {str(before), str(before + 1)}
    models = {version: loaded(tmp_path / version / "default" / "model") for version in (str(before), str(before + 1))}
    for reply in replies:
        banned = ends if reply in whole else []
        expected = own_logprobs(models[reply.headers[HEADER_POLICY]], reply.json(), banned)
        assert told_logprobs(reply.json()) == pytest.approx(expected, abs=1e-3), "of the version that it says"


async def long_replies(
    upstream: Upstream, update: asyncio.Task[Any], banned: Sequence[int], stream: bool
) -> list[httpx.Response]:
    """One after the other, the last of them after the update; without the `banned` tokens they have no end."""
    fields = {"max_tokens": 200, "temperature": 1.0, "logit_bias": {str(token): -100 for token in banned}}
    replies = []
    while True:
        reply = await ask(upstream, **fields, stream=stream)
        assert reply.status_code == 200, reply.text
        replies.append(added_up(reply) if stream else reply)
        if update.done():
            return replies


def added_up(stream: httpx.Response) -> httpx.Response:
    """The reply that would have come whole."""
    *events, last = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert last == "[DONE]", last
    completion = StreamedCompletion("reply")
    sizes = [len(delta.token_ids) for event in events for delta in completion.add(json.loads(event))]
    assert sum(map(bool, sizes)) > 20, "as its tokens come"
    whole = json.loads(completion.whole())
    return httpx.Response(200, headers={HEADER_POLICY: str(whole["agl"]["version"])}, json=whole)


async def test_a_server_that_dies_ends_the_run_with_the_remedy(engine: tuple[VerlEngine, Upstream]) -> None:
    """Last: nothing works after it."""
    served, _ = engine
    kill_a_server(served)
    batch = verl_bench.recorded_batch(parity.VOCABULARY)
    with pytest.raises(EngineError, match=r"(?s)A process of the engine was lost.*agl train --resume"):
        await served.update("default", batch)
    with pytest.raises(EngineError, match="was lost during 'update'"):
        await served.update("default", batch)


def kill_a_server(engine: VerlEngine) -> None:
    """End a vLLM server's process, as a lack of memory would."""
    family = psutil.Process(engine.pid).children(recursive=True)
    server = next(process for process in family if "VersionedServer" in " ".join(process.cmdline()))
    server.kill()
    server.wait(30)
