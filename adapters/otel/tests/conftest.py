"""Agents that make spans in this process, in front of a real Lightning Server with a scripted upstream."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

import agl_core
from agl_core.capture import ActiveAttempt, Recording, reports
from agl_core.learning import build_episode
from agl_core.types import AttemptKey, Ending, Episode
from agl_core.wire.workers import CloseRequest
from agl_otel import watching
from agl_otel.plugin import OtelAdapter

sys.path.append(str(Path(__file__).parents[3] / "core" / "tests" / "server"))

from instrumented import instrumenting
from stack import Stack, running_stack


@dataclass
class Attempts:
    """Attempts on a Lightning Server, as a worker runs them."""

    stack: Stack

    async def start(self) -> ActiveAttempt:
        key = await self.stack.lease()
        return ActiveAttempt(*key, self.stack.server.base_url, self.stack.key(key), Recording())

    async def end(self, active: ActiveAttempt) -> Episode:
        """Close it with what was reported, and build its episode from what is in the store."""
        key, store = AttemptKey(active.rollout, active.attempt), self.stack.store
        active.recording.close()
        report = CloseRequest(ending=Ending.FINISHED, tool_results=list(active.recording.tool_results))
        await self.stack.server.queue.close_attempt(key, report)
        (attempt,) = await store.attempts(key.rollout)
        return build_episode(
            await store.rollout(key.rollout), attempt, await store.calls([key]), await store.tool_results([key])
        )


@pytest.fixture
async def attempts() -> AsyncIterator[Attempts]:
    async with running_stack() as stack:
        yield Attempts(stack)


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
    assert agl_core.attach([OtelAdapter()]).failed == {}


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider(shutdown_on_exit=False)


@pytest.fixture
def instrument() -> Iterator[Callable[[Any, TracerProvider], None]]:
    with instrumenting() as instrument:
        yield instrument


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is about them."""
    yield
    if "expects_problems" not in request.keywords:
        assert [r.getMessage() for r in caplog.get_records("call") if r.name == reports.__name__] == []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_problems: the test makes an adapter fail")
