"""Agents that make spans, in front of a real Lightning Server with this package's routes and a scripted upstream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from testing_aids import instrumenting

import agl_core
from agl_core.plugins import Plugins
from agl_otel import plugin, watching
from agl_server.testing import Stack, no_problems, running_stack  # noqa: F401


@pytest.fixture
async def intake() -> AsyncIterator[Stack]:
    plugins = Plugins()
    plugins.register(plugin, "agl-otel")
    async with running_stack(hook=plugins.hook) as stack:
        yield stack


@pytest.fixture(autouse=True)
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what attaches in a test."""
    monkeypatch.setattr(TracerProvider, "__init__", TracerProvider.__init__)
    yield
    agl_core.attach([]).detach()
    watching.watch.cache_clear()


@pytest.fixture
def attached(detached: None) -> None:
    """Prepare as a worker does before it loads an agent."""
    assert agl_core.attach([plugin.otel]).failed == {}


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider(shutdown_on_exit=False)


@pytest.fixture
def instrument() -> Iterator[Callable[[Any, TracerProvider], None]]:
    with instrumenting() as instrument:
        yield instrument
