"""A Lightning Server in front of a scripted upstream, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from memory_store import MemoryStore
from scripted_upstream import ScriptedUpstream

from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.server import LightningServer
from agl_core.types import AttemptKey, Call, Mode, Rollout, Task
from agl_core.wire.workers import HeldAttempt, LeaseRequest
from agl_core.worker.environment import PLACEHOLDER_KEY


def make_rollout(id: str, **fields: Any) -> Rollout:
    defaults: dict[str, Any] = {
        "run": "run",
        "restart": 0,
        "group": "g",
        "task": Task("t", {"question": "?"}),
        "mode": Mode.TRAIN,
        "step": 0,
        "member": 0,
    }
    return Rollout(id=id, **{**defaults, **fields})


class Hooks:
    """Stands for `Plugins.hook`: notes what was fired."""

    def __init__(self) -> None:
        self.fired: list[tuple[Any, ...]] = []

    def rollout_started(self, *, rollout: Rollout, attempt: int) -> None:
        self._note("started", rollout.id, attempt)

    def rollout_finished(self, *, rollout: Rollout, attempt: Any) -> None:
        self._note("finished", rollout.id, attempt.attempt, attempt.ending)

    def _note(self, *event: Any) -> None:
        self.fired.append(event)


@dataclass
class Stack:
    """A running server, its store and its upstream."""

    server: LightningServer
    store: Any
    """A MemoryStore unless the test brought its own."""
    upstream: ScriptedUpstream
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    async def lease(self, **fields: Any) -> AttemptKey:
        """Enqueue a new rollout and lease it."""
        rollout = make_rollout(f"r{next(self._ids)}", **fields)
        await self.server.queue.enqueue([rollout])
        lease = (await self.server.queue.lease(LeaseRequest(worker="w", capacity=1, wait=0))).leases[0]
        assert lease.rollout == rollout.id
        return AttemptKey(lease.rollout, lease.attempt)

    def url(self, key: AttemptKey | None = None) -> str:
        place = "" if key is None else f"/rollout/{key.rollout}/attempt/{key.attempt}"
        return f"{self.server.base_url}{place}/v1"

    def key(self, attempt: AttemptKey) -> str:
        """The agent's key of an attempt."""
        return self.server.keys.of_attempt(attempt)

    def held(self, attempt: AttemptKey) -> HeldAttempt:
        """An attempt as a heartbeat of its worker names it."""
        return HeldAttempt(**attempt._asdict(), secret=self.server.keys.of_lease(attempt))

    def client(self, key: AttemptKey | None = None, **options: Any) -> openai.AsyncOpenAI:
        """A client that is closed with the stack; without an attempt it has no key, as one made before any attempt."""
        api_key = PLACEHOLDER_KEY if key is None else self.key(key)
        made = openai.AsyncOpenAI(**{"base_url": self.url(key), "api_key": api_key, "max_retries": 0, **options})
        self._clients.append(made)
        return made

    async def close_clients(self) -> None:
        for each in self._clients:
            await each.close()

    async def calls(self, key: AttemptKey) -> list[Call]:
        return await self.store.calls([key])


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition of another task or process that has no event to wait for."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def said_by_agl(caplog: pytest.LogCaptureFixture) -> str:
    """What agl logged, with tracebacks; what a client of an earlier test says as it is collected is not in it."""
    formatter = logging.Formatter()
    return "\n".join(formatter.format(each) for each in caplog.records if each.name.startswith("agl_"))


def key_of_url(stack: Stack, url: str) -> str:
    """The agent's key of the attempt that a URL names; one that is good for nothing if it names none."""
    named = re.search(r"/rollout/([^/]+)/attempt/(\d+)/", url)
    return stack.key(AttemptKey(named[1], int(named[2]))) if named else PLACEHOLDER_KEY


async def post(stack: Stack, url: str, content: bytes, **headers: str) -> httpx.Response:
    """POST these very bytes with the key of the attempt that the URL names."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(
            url, content=content, headers={"Authorization": f"Bearer {key_of_url(stack, url)}", **headers}
        )


@contextlib.asynccontextmanager
async def running_stack(
    *,
    store: Any = None,
    upstream_fields: Callable[[ScriptedUpstream], dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """`options` override those of LightningServer, `upstream_fields` those of Upstream; the store is in memory.

    With `upstream=None` the server has none.
    """
    async with ScriptedUpstream() as scripted:
        fields: dict[str, Any] = {"urls": (scripted.url,), "models": {"default": "served"}, "api_key": "upstream-key"}
        fields.update(upstream_fields(scripted) if upstream_fields else {})
        settings: dict[str, Any] = {
            "sampling": SamplingSection(temperature=0.7, eval_temperature=0.5, max_tokens=512),
            "seed": 1,
            "timeout": 30,
            "attempts": 2,
            "hook": Hooks(),
        }
        store = MemoryStore() if store is None else store
        upstream = options.pop("upstream", Upstream(**fields))
        async with LightningServer(store, upstream, **{**settings, **options}) as server:
            made = Stack(server, store, scripted)
            yield made
            await made.close_clients()


@contextlib.contextmanager
def stack_in_thread() -> Iterator[SimpleNamespace]:
    """The same in a thread with a loop of its own, for clients that block; one attempt is leased."""
    ready: threading.Event = threading.Event()
    found = SimpleNamespace()

    async def serve() -> None:
        found.stop, found.loop = asyncio.Event(), asyncio.get_running_loop()
        async with running_stack(
            upstream_fields=lambda _: {"models": {"default": "served", "other": "served-too"}}
        ) as stack:
            found.stack = stack
            found.key = await stack.lease()
            found.base_url, found.api_key = stack.url(found.key), stack.key(found.key)
            ready.set()
            await found.stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield found
    finally:
        found.loop.call_soon_threadsafe(found.stop.set)
        thread.join()
