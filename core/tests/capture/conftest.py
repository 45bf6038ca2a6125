"""agl attached to this process without an adapter, which modules whose tests all need it mark; and a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import agl_core
from agl_server.testing import Stack, running_stack


@pytest.fixture
def attached() -> Iterator[None]:
    attachment = agl_core.attach([])
    yield
    attachment.detach()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as running:
        yield running
