"""The engine with skyrl-tx: `make test-tinker`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

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


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(contract: EngineCase, check: EngineCheck) -> None:
    await check(contract)


async def test_the_context_is_the_shorter_one_of_model_and_settings(contract: EngineCase) -> None:
    assert contract.upstream.context_length == 256
