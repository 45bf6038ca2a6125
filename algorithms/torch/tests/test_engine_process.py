"""The whole engine: a real process, asked over HTTP, and its updates."""

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
import pytest
import pytest_asyncio

from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, Row, batch_of, engine_context
from agl_torch.loading import load_model
from agl_torch.plugin import TorchEngine, TorchOptions

from .conftest import CPU, LORA, all_logprobs, saved

in_one_loop = pytest.mark.asyncio(loop_scope="module")
OPTIMIZER = {"learning_rate": 1e-2}


@asynccontextmanager
async def running(folder: Path, model: Path, has_policy: bool = True, **changes: Any) -> AsyncIterator[EngineCase]:
    """The engine with the suite's policy, or with none."""
    context = engine_context(folder, str(model), optimizer=OPTIMIZER, **changes)
    context = context if has_policy else replace(context, policies={})
    engine = TorchEngine(TorchOptions(threads=1, cache_mib=16), context)
    try:
        yield EngineCase(engine, await engine.start(), context, folder)
    finally:
        await engine.stop()


def of_policy(case: EngineCase, name: str, spec: PolicySpec) -> EngineCase:
    """One of several policies."""
    return replace(
        case,
        upstream=replace(case.upstream, models={name: name}),
        context=replace(case.context, policies={name: spec}),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> AsyncIterator[EngineCase]:
    """One engine for all that leave it usable; starting one takes seconds."""
    async with running(tmp_path_factory.mktemp("case"), checkpoint) as running_case:
        yield running_case


@in_one_loop
async def test_replies_are_as_probable_as_recorded_under_the_weights_that_sampled_them(case: EngineCase) -> None:
    engine = case.engine
    assert case.upstream.context_length == 256
    old = await case.sampled()
    await case.update(old)
    new = await case.sampled()
    assert (await engine.logprobs("default", new)).logprobs_R == pytest.approx(new.behaviour_logprobs_R, abs=1e-4)
    assert np.abs((await engine.logprobs("default", old)).logprobs_R - old.behaviour_logprobs_R).max() > 1e-3
    with pytest.raises(EngineError, match="no policy 'calc'"):
        await engine.logprobs("calc", old)
    assert (await case.update(old)).metrics["logprob_gap_max"] > 1e-3


@in_one_loop
async def test_a_reply_that_was_begun_before_an_update_is_finished_by_its_version(case: EngineCase) -> None:
    long = {"n": 32, "max_tokens": 200}
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


async def test_versions_come_and_go_each_answers_by_its_own_weights_and_a_dead_engine_is_an_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    lora = PolicySpec(str(checkpoint), optimizer=OPTIMIZER, lora=LORA)
    one, two = (saved(tmp_path / str(updates), lora, updates)[1] for updates in (1, 2))
    _, full = saved(tmp_path / "full", PolicySpec(str(checkpoint), optimizer=OPTIMIZER))
    specs = {
        "run@1": PolicySpec(str(checkpoint), adapter=str(one)),
        "run@2": PolicySpec(str(checkpoint), adapter=str(two)),
        "full@1": PolicySpec(str(full)),
        "run@0": PolicySpec(str(checkpoint)),
    }
    async with running(tmp_path, checkpoint, has_policy=False) as case:
        engine: Any = case.engine
        assert (dict(case.upstream.models), case.upstream.context_length) == ({}, None)

        async def ask(name: str) -> Row:
            return Row.of_reply((await of_policy(case, name, specs[name]).ask("Tom has 5 apples")).json(), 0.0)

        for name, spec in specs.items():
            await engine.load_policy(name, spec)
        answers = dict(zip(specs, await asyncio.gather(*map(ask, specs)), strict=True))
        for name, row in answers.items():
            expected = all_logprobs(load_model(specs[name], CPU, 0).model, batch_of([row]))
            np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)
        assert len({tuple(row.logprobs) for row in answers.values()}) == len(specs)

        requests = [asyncio.ensure_future(ask("run@2")) for _ in range(20)]
        await asyncio.sleep(0)
        await engine.unload_policy("run@1")
        await asyncio.gather(*requests)
        assert (await of_policy(case, "run@1", specs["run@1"]).ask()).status_code == 404
        await engine.load_policy("run@1", specs["run@1"])
        assert (await ask("run@1")).logprobs == pytest.approx(answers["run@1"].logprobs, abs=1e-4)

        with pytest.raises(EngineError, match="'run@1' is served already"):
            await engine.load_policy("run@1", specs["run@0"])
        with pytest.raises(EngineError, match="trained on other weights"):
            await engine.load_policy("other", PolicySpec(str(full), adapter=str(one)))
        with pytest.raises(EngineError, match="Did you mean 'run@"):
            await engine.unload_policy("runs@1")
        assert (await ask("run@0")).response
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"lost during 'load_policy'.*exit code -9.*cache_mib.*Start it again"):
            await engine.load_policy("run@3", specs["run@2"])


def test_the_run_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, agl_torch.plugin as p, agl_algorithms.plugin\n"
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
