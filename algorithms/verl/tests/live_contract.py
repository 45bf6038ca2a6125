"""What every engine must honour, of the veRL engine on a CPU: Ray, veRL's trainer and workers, vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, engine_context
from agl_verl.engine import VerlEngine
from agl_verl.plugin import VerlOptions

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("case")
    context = engine_context(folder, str(POLICY), dtype="float32")
    engine = VerlEngine(VerlOptions(device="cpu", gradient_checkpointing=False, max_context=512), context)
    try:
        yield EngineCase(engine, await engine.start(), context, folder, tolerance=1e-4)
    finally:
        await engine.stop()


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(case: EngineCase, check: EngineCheck) -> None:
    await check(case)
