"""Several model servers: a rollout stays with one, load is spread, and a server that is away costs no rollout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from agl_core.protocols import Upstream
from agl_core.server.upstream import REST, SLACK, UpstreamClient
from agl_core.testing.scripts import Drop, Fail, Hold
from agl_core.testing.server import Stack, running_stack, until
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey

ASKED: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Stack, ScriptedUpstream, ScriptedUpstream]]:
    """A Lightning Server in front of two model servers."""
    async with ScriptedUpstream() as first, ScriptedUpstream() as second:
        urls = (first.url, second.url)
        async with running_stack(upstream_fields=lambda _: {"urls": urls}) as stack:
            yield stack, first, second


class Clock:
    """Shows what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def client_of(*urls: str, clock: Clock | None = None) -> UpstreamClient:
    return UpstreamClient(Upstream(urls, {"default": "m"}, "key"), 10, clock or Clock())


async def test_a_rollout_leaves_a_server_only_when_it_is_overloaded() -> None:
    release = asyncio.Event()
    async with two_servers() as (_, first, second):
        client, key = client_of(first.url, second.url), AttemptKey("mine", 0)
        for server in (first, second):
            server.script(*(Hold(release=release) for _ in range(SLACK + 2)))
        asking = [asyncio.create_task(client.complete(ASKED, key)) for _ in range(SLACK + 2)]
        await until(lambda: len(first.received) + len(second.received) == SLACK + 2)
        assert {len(first.received), len(second.received)} == {SLACK + 1, 1}
        release.set()
        await asyncio.gather(*asking)
        client.close()


async def test_a_server_that_is_away_is_left_alone_for_a_while() -> None:
    clock = Clock()
    async with ScriptedUpstream() as there:
        client = client_of("http://127.0.0.1:9/v1", there.url, clock=clock)
        for number in range(20):
            await client.complete(ASKED, AttemptKey(str(number), 0))
        assert {client.server_of(str(number)) for number in range(40)} == {there.url}
        clock.now = REST
        assert len({client.server_of(str(number)) for number in range(40, 80)}) == 2
        client.close()


async def test_when_a_server_dies_its_rollouts_go_on_at_the_other() -> None:
    async with two_servers() as (stack, dying, staying):
        keys = [await stack.lease() for _ in range(8)]
        clients = [stack.client(key) for key in keys]

        async def everyone_asks() -> None:
            await asyncio.gather(*(client.chat.completions.create(**ASKED) for client in clients))

        await everyone_asks()
        assert (len(dying.received), len(staying.received)) == (4, 4)
        before = {each.headers["x-agl-rollout"] for each in staying.received}
        await everyone_asks()
        assert {each.headers["x-agl-rollout"] for each in staying.received} == before, "each where it was"
        await dying.__aexit__()
        await everyone_asks()
        await everyone_asks()
        assert len(dying.received) == 8
        assert len(staying.received) == 8 + 16
        assert [len(await stack.calls(key)) for key in keys] == [4] * 8


@pytest.mark.parametrize("failure", [Drop(), Fail(503)])
async def test_a_reply_that_breaks_off_is_sampled_at_the_other_server(failure: Any) -> None:
    async with two_servers() as (_, first, second):
        first.script(failure)
        client = client_of(first.url, second.url)
        await asyncio.gather(*(client.complete(ASKED, AttemptKey(str(number), 0)) for number in range(2)))
        assert (len(first.received), len(second.received)) == (1, 2)
        client.close()


async def test_what_a_server_refuses_is_asked_of_no_other() -> None:
    async with two_servers() as (stack, first, second):
        for server in (first, second):
            server.script(Fail(400), Fail(500))
        key = await stack.lease()
        for refused in (openai.BadRequestError, openai.InternalServerError):
            with pytest.raises(refused):
                await stack.client(key).chat.completions.create(**ASKED)
        assert {len(first.received), len(second.received)} == {0, 2}
