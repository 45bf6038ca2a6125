"""Fixtures of the server's tests; the helpers beside this file are importable from the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anthropic
import httpx
import openai
import pytest
from memory_store import MemoryStore
from testing_aids import fast_clients

from agl_core.types import AttemptKey
from agl_server.testing import Stack, running_stack

from .server_aids import client_of


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
async def key(stack: Stack) -> AttemptKey:
    """An attempt on the stack."""
    return await stack.lease()


@pytest.fixture
def client(stack: Stack, key: AttemptKey) -> openai.AsyncOpenAI:
    return stack.client(key)


@pytest.fixture
def claude(stack: Stack, key: AttemptKey) -> anthropic.AsyncAnthropic:
    return client_of(stack, key)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client that knows no API."""
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
