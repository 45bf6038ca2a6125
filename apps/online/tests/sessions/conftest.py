"""A deployed server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .deployed import Deployed, deployed


@pytest.fixture
async def use(tmp_path: Path) -> AsyncIterator[Deployed]:
    async with deployed(tmp_path) as running:
        yield running
