"""Every cell of the conformance suite: exactly the expected transitions; each declared gap is one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai._base_client
import pytest
import pytest_asyncio

from agl_core.testing.adapters.bench import Bench, running_bench
from agl_core.testing.adapters.matrix import Cell, cells

from .driver import Smolagents


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with running_bench(tmp_path_factory.mktemp("conformance")) as running:
        yield running


@pytest.fixture(autouse=True)
def fast_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They retry at once."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.001)
    return


@pytest.mark.parametrize("cell", list(cells([Smolagents()])), ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_cell(cell: Cell, bench: Bench) -> None:
    await bench.check(cell)
