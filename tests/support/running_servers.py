"""Servers for tests of several packages: one for clients that block, `agl worker`, a vendor's model server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agl_core.capture import AttemptContext, Recording
from agl_core.protocols import Adapter
from agl_core.testing.scripts import Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Attempt, Rollout
from agl_server.testing import LeasedAttempt, Stack, attached_stack, running_stack

Upstream = TypeVar("Upstream", bound=ScriptedUpstream)


@contextlib.contextmanager
def stack_in_thread() -> Iterator[tuple[Stack, BlockingPortal]]:
    """A stack for clients that block, and what calls functions in its thread. It has the policies default and other."""
    stack = running_stack(upstream_fields=lambda _: {"models": {"default": "served", "other": "served-too"}})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stack) as running:
        yield running, portal


def stack_fixture(*adapters: Adapter, **options: Any) -> Any:
    """The fixture `stack`, a server for agents that only these adapters observe; for a name in your module."""

    @pytest.fixture(name="stack")
    async def attached() -> AsyncIterator[Stack]:
        async with attached_stack(*adapters, **options) as running:
            yield running

    return attached


@pytest.fixture(name="attempt")
async def leased_attempt(stack: Stack) -> LeasedAttempt:
    return await stack.attempt()


async def run_worker(stack: Stack, rollout: Rollout, folder: Path, *arguments: str, **variables: str) -> Attempt:
    """The rollout after `agl worker` ran it as a user would, in this folder and with these variables."""
    server = stack.server
    await server.queue.enqueue([rollout])
    worker = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("agl"), "worker", *arguments, "--server", server.base_url),
        cwd=folder,
        env={**os.environ, **variables},
        stderr=asyncio.subprocess.PIPE,
    )
    done = asyncio.create_task(server.queue.done([rollout.id]))
    exited = asyncio.create_task(worker.communicate())
    await asyncio.wait({done, exited}, return_when=asyncio.FIRST_COMPLETED)
    server.queue.close()
    _, complaints = await exited
    assert worker.returncode == 0, complaints.decode()
    [attempt] = await stack.store.attempts(rollout.id)
    return attempt


@contextlib.contextmanager
def serving_a_vendor(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """The server says "done", like those of vendors, who return no token ids; clients find it in the environment."""
    with upstream:
        upstream.answer, upstream.returns_ids = lambda received: Say("done"), False
        monkeypatch.setenv("OPENAI_BASE_URL", upstream.url)
        monkeypatch.setenv("OPENAI_API_BASE", upstream.url)
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        yield upstream


@pytest.fixture(name="server")
def scripted_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedUpstream]:
    with serving_a_vendor(ScriptedUpstream(), monkeypatch) as upstream:
        yield upstream


@pytest.fixture(name="attempt")
def attempt_maker(server: ScriptedUpstream) -> Callable[..., AttemptContext]:
    """Makes attempts whose Lightning Server is the scripted one."""
    return lambda rollout="r1": AttemptContext(rollout, 0, server.root, "key", Recording())


def free_port() -> int:
    """A port outside the range that the system hands out, so that it is still free when a server starts there."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")
