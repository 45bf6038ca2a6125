"""The ways to run and to observe an agent."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import agents
import openai
import pytest
from agents.models import _openai_shared, openai_provider
from agents.tracing import processors, setup
from agents.tracing.processor_interface import TracingExporter
from running_servers import attempt_maker, serving_a_vendor  # noqa: F401

import agl_core
from agl_core.testing.upstream import ScriptedUpstream
from agl_openai_agents import runs
from agl_server.testing import no_problems  # noqa: F401

from .responses_upstream import ResponsesUpstream


class Exports(TracingExporter):
    """Takes what the SDK's default processor would send to its vendor."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def export(self, items: list[Any]) -> None:
        self.items += items


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    """The SDK as it is before anything has touched it, except that nothing leaves this machine; what attaches in
    the test is undone."""
    exports = Exports()
    processor = processors.BatchTraceProcessor(exports)
    monkeypatch.setattr(processors, "_global_processor", processor)
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    monkeypatch.setattr(openai_provider, "_http_client", None)
    for module, name, _ in runs._SEAMS:
        patched = sys.modules[module]
        monkeypatch.setattr(patched, name, inspect.unwrap(getattr(patched, name)))  # another test's may be attached
    yield exports
    processor._shutdown_event.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ResponsesUpstream]:
    with serving_a_vendor(ResponsesUpstream(), monkeypatch) as upstream:
        yield upstream


@pytest.fixture(autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop per test, for the SDK keeps its HTTP client between runs; `run_sync` uses it too."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


Run = Callable[..., Any]


def run_async(agent: Any, question: Any, **options: Any) -> Any:
    return asyncio.get_event_loop().run_until_complete(agents.Runner.run(agent, question, **options))


def run_streamed(agent: Any, question: Any, **options: Any) -> Any:
    async def consume() -> Any:
        result = agents.Runner.run_streamed(agent, question, **options)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.get_event_loop().run_until_complete(consume())


@pytest.fixture(params=[(run_async, "responses"), (run_streamed, "chat")], ids=["run-responses", "streamed-chat"])
def run_briefly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: ScriptedUpstream) -> Run:
    """Both of the SDK's loops and both APIs, for what does not depend on how they are combined."""
    way, api = request.param
    monkeypatch.setattr(_openai_shared, "_use_responses_by_default", api == "responses")
    return way


@pytest.fixture
def no_retries(server: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails is not sent again."""
    monkeypatch.setattr(_openai_shared, "_default_openai_client", openai.AsyncOpenAI(max_retries=0))


@pytest.fixture
def detached() -> Iterator[None]:
    """Undo what attaches in the test."""
    yield
    agl_core.attach([]).detach()


@pytest.fixture
def attached(detached: None) -> None:
    agl_core.attach()
