"""Servers that tests of several packages run: a Lightning Server for clients that block, a vendor's model server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agl_core.capture import AttemptContext, Recording
from agl_core.testing.scripts import Say
from agl_core.testing.server import Stack, running_stack
from agl_core.testing.upstream import ScriptedUpstream

Upstream = TypeVar("Upstream", bound=ScriptedUpstream)


@contextlib.contextmanager
def stack_in_thread() -> Iterator[tuple[Stack, BlockingPortal]]:
    """A stack for clients that block, and what calls functions in its thread. It has the policies default and other."""
    stack = running_stack(upstream_fields=lambda _: {"models": {"default": "served", "other": "served-too"}})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stack) as running:
        yield running, portal


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
