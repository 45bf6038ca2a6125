"""The engine with skyrl-tx: `make test-tinker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_core.config.sections import LoraSection
from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, engine_context
from agl_tinker.plugin import TinkerEngine, TinkerOptions

from .skyrl_tx import SkyrlTx

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def contract(server: SkyrlTx, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("case")
    (folder / "run").mkdir()
    context = engine_context(folder, str(server.policy), lora=LoraSection(rank=8))
    engine = TinkerEngine(TinkerOptions(base_url=server.url, base_model=server.base, max_context=256), context)
    try:
        yield EngineCase(engine, await engine.start(), context, folder, tolerance=1e-4)
    finally:
        await engine.stop()


async def check_peft_reads_the_saved_adapter(case: EngineCase) -> None:
    """Its log-probabilities on this machine are the service's."""
    batch = await case.sampled()
    await case.update(batch)
    folder = case.folder / "exported"
    await case.engine.save(folder)
    base = AutoModelForCausalLM.from_pretrained(case.context.policies[case.policy].model, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, folder / case.policy / "model")
    described = PeftConfig.from_pretrained(folder / case.policy / "model")
    assert described.base_model_name_or_path == case.context.policies[case.policy].model
    AutoTokenizer.from_pretrained(folder / case.policy / "model")

    def logprobs(row: int) -> torch.Tensor:
        start, end, prompt = *batch.offsets[row : row + 2], batch.prompt_lengths_N[row]
        tokens = torch.from_numpy(batch.tokens_T[start:end].astype(np.int64))
        scores = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), dim=-1)
        return scores.gather(1, tokens[1:, None])[prompt - 1 :, 0]

    served = (await case.engine.logprobs(case.policy, batch)).logprobs_R
    with torch.no_grad():
        np.testing.assert_allclose(torch.cat([logprobs(row) for row in range(len(batch))]), served, rtol=0, atol=1e-4)
        with model.disable_adapter():
            base_R = torch.cat([logprobs(row) for row in range(len(batch))])
    assert np.abs(base_R.numpy() - served).max() > 1e-3, "the adapter does something"


CHECKS = [*ENGINE_CHECKS[:-1], check_peft_reads_the_saved_adapter, ENGINE_CHECKS[-1]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(contract: EngineCase, check: EngineCheck) -> None:
    await check(contract)


async def test_the_context_is_the_shorter_one_of_model_and_settings(contract: EngineCase) -> None:
    assert contract.upstream.context_length == 256
