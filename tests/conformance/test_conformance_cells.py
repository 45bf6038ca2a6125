"""Every cell of the matrix: each adapter makes exactly the expected transitions; each declared gap is one.

`make test` plays one cell of each driver and scenario; the others are left to `make test-all`.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.asyncio(loop_scope="module")
async def test_cell(cell: Any, bench: Any) -> None:
    await bench.check(cell)


@pytest.mark.asyncio(loop_scope="module")
async def test_cell_alone(cell: Any, bench: Any) -> None:
    """Without a server the same agent gives the same episodes, ids and log-probabilities included."""
    assert await bench.play_alone(cell) == []
