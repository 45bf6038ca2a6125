"""The whole engine: a real process, the openai client, a real update."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, Row, batch_of, engine_context
from agl_core.types import Batch
from agl_torch.loading import load_model
from agl_torch.plugin import TorchEngine, TorchOptions

from .conftest import LORA, Shape, make_batch, make_checkpoint, plain_logprobs, saved

in_one_loop = pytest.mark.asyncio(loop_scope="module")
OPTIMIZER = {"learning_rate": 1e-2}
SMALL = {"threads": 1, "cache_mib": 16}


def context(tmp_path: Path, checkpoint: Path, **changes: Any) -> EngineContext:
    fields: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "seed": 3,
        "policies": {"default": PolicySpec(str(checkpoint), optimizer=OPTIMIZER)},
        "deterministic": False,
        "plugin_files": (),
        "api_key": "sk-test",
    }
    return EngineContext(**(fields | changes))


@asynccontextmanager
async def running(where: EngineContext, **options: Any) -> AsyncIterator[tuple[TorchEngine, Upstream]]:
    engine = TorchEngine(TorchOptions(**(SMALL | options)), where)
    try:
        yield engine, await engine.start()
    finally:
        await engine.stop()


async def chat(upstream: Upstream, question: str, model: str = "default", **more: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=upstream.urls[0], api_key=upstream.api_key) as client:
        return await client.chat.completions.create(
            model=upstream.models[model],
            messages=[{"role": "user", "content": question}],
            max_tokens=20,
            logprobs=True,
            extra_body={"return_token_ids": True},
            **more,
        )


async def sampled(upstream: Upstream, values: list[float]) -> Batch:
    """Replies to questions, of which two are one, at a temperature of 0.7."""
    questions = ["What is 12 plus 345?", "Tom", "Tom", "Grüße, 世界! What is 1234567890 minus 1?"]
    replies = await asyncio.gather(*(chat(upstream, q, temperature=0.7, seed=i) for i, q in enumerate(questions)))
    rows = [Row.of_reply(reply.model_dump(), value) for reply, value in zip(replies, values, strict=True)]
    return batch_of(rows, temperature=0.7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> AsyncIterator[EngineCase]:
    """One engine for all that leave it usable; starting one takes seconds."""
    folder = tmp_path_factory.mktemp("case")
    where = engine_context(folder, str(checkpoint), optimizer=OPTIMIZER)
    async with running(where) as (engine, upstream):
        yield EngineCase(engine, upstream, where, folder)


@in_one_loop
async def test_sample_train_sample(case: EngineCase) -> None:
    engine, upstream = case.engine, case.upstream
    assert upstream.context_length == 256
    stats_before = await engine.stats()
    batch = await sampled(upstream, [1.0, 0.0, 0.5, 0.0])
    result = await engine.update("default", batch)

    assert result.metrics["logprob_gap_max"] <= 1e-4
    assert result.weight_N.sum() == pytest.approx(1.0, abs=1e-6)

    # The new weights are served, and the trainer agrees with the sampler about them too.
    second = await sampled(upstream, [0.0, 1.0, 0.0, 0.0])
    assert not np.array_equal(second.behaviour_logprobs_R, batch.behaviour_logprobs_R)
    result = await engine.update("default", second)
    assert result.metrics["logprob_gap_max"] <= 1e-4

    # Replies are as probable as recorded under the weights that sampled them, and not under later ones.
    third = await sampled(upstream, [0.0, 1.0, 0.0, 0.0])
    assert (await engine.logprobs("default", third)).logprobs_R == pytest.approx(third.behaviour_logprobs_R, abs=1e-4)
    assert np.abs((await engine.logprobs("default", batch)).logprobs_R - batch.behaviour_logprobs_R).max() > 1e-3
    with pytest.raises(EngineError, match="no policy 'calc'"):
        await engine.logprobs("calc", batch)

    # An old batch is off-policy by now.
    stale = await engine.update("default", batch)
    assert stale.metrics["logprob_gap_max"] > 1e-3
    stats = await engine.stats()
    tokens = {name: value - stats_before[name] for name, value in stats.items() if name.startswith("tokens_")}
    assert tokens["tokens_decoded"] == sum(b.mask_R.size for b in (batch, second, third))
    assert tokens["tokens_prefilled"] + tokens["tokens_reused"] == 3 * batch.prompt_lengths_N.sum()
    assert 2**26 < stats["peak_rss_bytes"] < 2**30


@in_one_loop
async def test_a_reply_that_was_begun_before_an_update_is_finished_by_its_version(case: EngineCase) -> None:
    long = {"n": 64, "max_tokens": 200}
    alone, batch, stats = await case.ask(**long), await case.sampled(), await case.engine.stats()
    asking = asyncio.create_task(case.ask(**long))
    while (await case.engine.stats())["tokens_decoded"] == stats["tokens_decoded"]:
        assert not asking.done()
    result = await case.update(batch)
    replies = [await asking, await case.ask(**long)]
    assert [reply.headers[HEADER_POLICY] for reply in replies] == [str(result.version - 1), str(result.version)]
    ids = [[choice["token_ids"] for choice in reply.json()["choices"]] for reply in (alone, *replies)]
    assert ids[0] == ids[1] != ids[2]


@in_one_loop
async def test_no_part_of_a_reply_waits_for_an_acknowledgement(case: EngineCase) -> None:
    seconds, key = [], {"Authorization": f"Bearer {case.upstream.api_key}"}
    async with httpx.AsyncClient(headers=key) as client:
        for _ in range(15):
            started = time.perf_counter()
            (await client.get(f"{case.upstream.urls[0]}/models")).raise_for_status()
            seconds.append(time.perf_counter() - started)
    assert np.median(seconds) < 0.03, "a delayed acknowledgement takes 0.04"


@in_one_loop
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(case: EngineCase, check: EngineCheck) -> None:
    await check(case)


async def test_several_policies_are_separate_and_a_dead_engine_is_an_error(tmp_path: Path, checkpoint: Path) -> None:
    llama = make_checkpoint(tmp_path / "llama", Shape("llama", tied=False, eos=("<|eot_id|>",)))
    policies = {
        "writer": PolicySpec(str(checkpoint), optimizer=OPTIMIZER, lora=LORA, algorithm_options={"beta": 0.1}),
        "critic": PolicySpec(str(llama), optimizer=OPTIMIZER, dtype="bfloat16", algorithm_options={"epochs": 100}),
    }
    policies = {name: replace(spec, algorithm="grpo") for name, spec in policies.items()}
    async with running(context(tmp_path, checkpoint, policies=policies)) as (engine, upstream):
        assert dict(upstream.models) == {"writer": "writer", "critic": "critic"}
        before = [await chat(upstream, "Tom", model, seed=1, temperature=1.0) for model in ("writer", "critic")]
        await engine.update("writer", make_batch(None))
        assert (await engine.update("writer", make_batch(None))).metrics["kl_reference"] > 1e-6
        assert await engine.versions() == {"writer": 2, "critic": 0}
        after = [await chat(upstream, "Tom", model, seed=1, temperature=1.0) for model in ("writer", "critic")]
        assert before[0].choices[0].logprobs != after[0].choices[0].logprobs
        assert before[1].choices[0].logprobs == after[1].choices[0].logprobs
        with pytest.raises(EngineError, match="Did you mean 'writer'"):
            await engine.update("writr", make_batch(None))
        await check_that_a_dead_process_is_an_error(engine, "critic")


async def check_that_a_dead_process_is_an_error(engine: TorchEngine, policy: str) -> None:
    assert engine.pid is not None
    started = asyncio.Event()
    update = asyncio.ensure_future(engine.update(policy, make_batch(None), lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 60)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"lost during 'update'.*exit code -9.*cache_mib.*last checkpoint"):
        await asyncio.wait_for(update, 60)


async def test_versions_come_and_go_and_each_answers_by_its_own_weights(tmp_path: Path, checkpoint: Path) -> None:
    lora = PolicySpec(str(checkpoint), optimizer=OPTIMIZER, lora=LORA)
    one, two = (saved(tmp_path / str(updates), lora, updates)[1] for updates in (1, 2))
    _, full = saved(tmp_path / "full", PolicySpec(str(checkpoint), optimizer=OPTIMIZER))
    specs = {
        "run@1": PolicySpec(str(checkpoint), adapter=str(one)),
        "run@2": PolicySpec(str(checkpoint), adapter=str(two)),
        "full@1": PolicySpec(str(full)),
        "run@0": PolicySpec(str(checkpoint)),
    }
    async with running(context(tmp_path, checkpoint, policies={})) as (engine, upstream):
        assert (dict(upstream.models), upstream.context_length) == ({}, None)
        upstream = replace(upstream, models={name: name for name in specs})

        async def ask(name: str) -> Row:
            return Row.of_reply((await chat(upstream, "Tom has 5 apples", name, seed=1)).model_dump(), 0.0)

        for name, spec in specs.items():
            await engine.load_policy(name, spec)
        answers = dict(zip(specs, await asyncio.gather(*map(ask, specs)), strict=True))
        for name, row in answers.items():
            model = load_model(specs[name], torch.device("cpu"), 0).model
            with torch.no_grad():
                expected = plain_logprobs(model, batch_of([row]), 0)
            np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)
        assert len({tuple(row.logprobs) for row in answers.values()}) == len(specs)

        requests = [asyncio.ensure_future(ask("run@2")) for _ in range(20)]
        await asyncio.sleep(0)
        await engine.unload_policy("run@1")
        await asyncio.gather(*requests)
        with pytest.raises(openai.NotFoundError, match="no model 'run@1'"):
            await ask("run@1")
        await engine.load_policy("run@1", specs["run@1"])
        assert (await ask("run@1")).logprobs == pytest.approx(answers["run@1"].logprobs, abs=1e-4)

        with pytest.raises(EngineError, match="'run@1' is served already"):
            await engine.load_policy("run@1", specs["run@0"])
        with pytest.raises(EngineError, match="trained on other weights"):
            await engine.load_policy("other", PolicySpec(str(full), adapter=str(one)))
        with pytest.raises(EngineError, match="Did you mean 'run@"):
            await engine.unload_policy("runs@1")
        assert (await ask("run@0")).response


def test_the_run_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, agl_torch.plugin as p\n"
        "from agl_core.kinds import NoOptions\n"
        f"t = p.TensorBoardTracker(NoOptions(), pathlib.Path({str(tmp_path)!r}))\n"
        "t.log(3, {'reward/mean': 0.5}); t.close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors("reward/mean")
    assert event.step == 3
    assert event.tensor_proto.float_val[0] == 0.5


def test_the_process_does_without_torchs_compiler_until_something_compiles() -> None:
    code = (
        "import sys\n"
        "from agl_torch.__main__ import defer_compiler\n"
        "defer_compiler()\n"
        "import agl_torch.process, torch\n"
        "adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])\n"
        "adam.param_groups[0]['params'][0].grad = torch.ones(2); adam.step()\n"
        "assert 'torch._dynamo.symbolic_convert' not in sys.modules\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(1)).item() == 1.0\n"
        "assert 'torch._dynamo.symbolic_convert' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
