"""A running Lightning Server in front of a scripted model server, and attempts on it.

async with running_stack() as stack:
    attempt = await stack.attempt()
    with attempt.running():  # as a worker runs an agent
        await my_agent(base_url=stack.url(attempt.key))
    assert [call.agent for call in await attempt.calls()] == ["solver"]
    assert (await attempt.close()).unjoined == ()
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from agl_core.capture import AttemptContext, Recording, attach, reports, running
from agl_core.capture.requests import rollout_path
from agl_core.client.agent import PLACEHOLDER_KEY, AttemptEnd, closing
from agl_core.config.models import SamplingSection
from agl_core.config.sections import ServerSection
from agl_core.learning.transitions import build_episode
from agl_core.plugins import Plugins
from agl_core.protocols import Adapter, Upstream
from agl_core.testing import episodes as make
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Call, Ending, Episode, ToolResult
from agl_core.wire import LeaseRequest
from agl_server.gateway.attempts import RunSettings
from agl_server.server import LightningServer
from agl_server.store.sqlite import SqliteStore


@dataclass
class Stack:
    """A running server, its store and its model server."""

    server: LightningServer
    store: Any
    upstream: ScriptedUpstream
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    async def lease(self, **fields: Any) -> AttemptKey:
        """Enqueue a new rollout, which has these fields, and lease it."""
        rollout = make.rollout(f"r{next(self._ids)}", **fields)
        await self.server.queue.enqueue([rollout])
        (lease,) = (await self.server.queue.lease(LeaseRequest(worker="w", capacity=1, wait=0))).leases
        assert lease.rollout == rollout.id
        return AttemptKey(lease.rollout, lease.attempt)

    async def attempt(self, *, base_url: str | None = None, **fields: Any) -> LeasedAttempt:
        """An attempt of a new rollout with these fields; `base_url` is another way to the server."""
        key = await self.lease(**fields)
        active = AttemptContext(*key, base_url or self.server.base_url, self.key(key), Recording())
        return LeasedAttempt(self, key, active)

    def url(self, key: AttemptKey | None = None) -> str:
        """The base URL for clients: an attempt's own, or the server's, for requests that are stamped."""
        return f"{self.server.base_url}{rollout_path(*key) if key else ''}/v1"

    def key(self, attempt: AttemptKey) -> str:
        return self.server.keys.of_attempt(attempt)

    def client(self, key: AttemptKey | None = None, **options: Any) -> openai.AsyncOpenAI:
        """A client that is closed with the stack; without an attempt it has no key."""
        api_key = PLACEHOLDER_KEY if key is None else self.key(key)
        client = openai.AsyncOpenAI(**{"base_url": self.url(key), "api_key": api_key, "max_retries": 0, **options})
        self._clients.append(client)
        return client

    async def calls(self, key: AttemptKey) -> list[Call]:
        return list(await self.store.calls([key]))

    async def episode(self, key: AttemptKey) -> Episode:
        (attempt,) = [attempt for attempt in await self.store.attempts(key.rollout) if attempt.key == key]
        rollout, calls = await self.store.rollout(key.rollout), await self.store.calls([key])
        return build_episode(rollout, attempt, calls, await self.store.tool_results([key]))


@dataclass(frozen=True)
class LeasedAttempt:
    """An attempt, with what its agent reported so far."""

    stack: Stack
    key: AttemptKey
    active: AttemptContext

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Run an agent inside it, as a worker does."""
        return running(self.active)

    @property
    def tool_results(self) -> Sequence[ToolResult]:
        return self.active.recording.tool_results

    async def calls(self) -> list[Call]:
        return await self.stack.calls(self.key)

    async def agents(self) -> list[str | None]:
        return [call.agent for call in await self.calls()]

    async def close(self) -> Episode:
        """Close it with what was reported, as a worker does, and build its episode."""
        self.active.recording.close()
        report = closing(AttemptEnd(Ending.FINISHED), self.active.recording)
        await self.stack.server.queue.close_attempt(self.key, report)
        return await self.stack.episode(self.key)


@contextlib.asynccontextmanager
async def running_stack(
    *,
    store: Any = None,
    upstream_fields: Callable[[ScriptedUpstream], dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """`options` override fields of RunSettings and ServerSection, and the other parameters of LightningServer.

    `upstream_fields` override those of Upstream; with `upstream=None` the server has none.
    """
    async with contextlib.AsyncExitStack() as last:
        if store is None:
            folder = Path(last.enter_context(tempfile.TemporaryDirectory()))
            store = await last.enter_async_context(SqliteStore(folder / "store.sqlite"))
        scripted = await last.enter_async_context(ScriptedUpstream())
        served = Upstream(urls=(scripted.url,), models={"default": "served"}, api_key="upstream-key", streams=True)
        served = replace(served, **(upstream_fields(scripted) if upstream_fields else {}))
        sampling = SamplingSection(temperature=0.7, max_tokens=512)
        tried: dict[str, Any] = {"sampling": sampling, "seed": 1, "timeout": 30, "attempts": 2}
        settings = RunSettings(**tried | _taken(options, RunSettings.__slots__))
        listen = ServerSection.model_validate(_taken(options, ServerSection.model_fields))
        upstream, hook = options.pop("upstream", served), options.pop("hook", Plugins().hook)
        async with LightningServer(store, upstream, settings, hook, listen=listen, **options) as server:
            stack = Stack(server, store, scripted)
            yield stack
            for client in stack._clients:
                await client.close()


def _taken(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The options of these names; the others are left."""
    return {name: options.pop(name) for name in options.keys() & set(names)}


@contextlib.asynccontextmanager
async def attached_stack(*adapters: Adapter, **options: Any) -> AsyncIterator[Stack]:
    """A `running_stack` for agents that only these adapters observe."""
    attachment = attach(adapters)
    assert attachment.failed == {}
    try:
        async with running_stack(**options) as stack:
            yield stack
    finally:
        attachment.detach()


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition of another task or process that has no event to wait for."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def no_problems(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Adapters swallow their failures; here they fail the test, unless it is marked with `expects_problems`.

    Import it into a `conftest.py`.
    """
    yield
    if "expects_problems" not in request.keywords:
        problems = [record for record in caplog.get_records("call") if record.name == reports.__name__]
        assert [problem.getMessage() for problem in problems] == []
