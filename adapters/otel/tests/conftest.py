"""Agents that make spans in this process, in front of a real Lightning Server with a scripted upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from testing_aids import instrumenting

import agl_core
from agl_core.testing.fixtures import no_problems  # noqa: F401
from agl_core.testing.server import Stack, running_stack
from agl_otel import plugin, watching


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What attaches in a test is undone."""
    monkeypatch.setattr(TracerProvider, "__init__", TracerProvider.__init__)
    yield
    agl_core.attach([]).detach()
    watching.watch.cache_clear()


@pytest.fixture
def attached(detached: None) -> None:
    """What a worker does before it loads an agent."""
    assert agl_core.attach([plugin.otel]).failed == {}


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider(shutdown_on_exit=False)


@pytest.fixture
def instrument() -> Iterator[Callable[[Any, TracerProvider], None]]:
    with instrumenting() as instrument:
        yield instrument
