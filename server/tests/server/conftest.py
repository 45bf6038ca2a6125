"""Fixtures of the server's tests; the helpers beside this file are importable from the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from memory_store import MemoryStore
from testing_aids import fast_clients

from agl_server.testing import Stack, running_stack


@pytest.fixture(scope="session", autouse=True)
def clients() -> Iterator[None]:
    """Retries come at once."""
    with fast_clients():
        yield


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(store=MemoryStore()) as running:
        yield running


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
