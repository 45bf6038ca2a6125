"""Several model servers: a rollout stays with one, load is spread, and a server that is away costs no rollout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.server.gateway import upstream
from agl_core.server.gateway.upstream import REST, SLACK, Router
from agl_core.testing.scripts import Drop, Fail
from agl_core.testing.server import Stack, running_stack
from agl_core.testing.upstream import ScriptedUpstream

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


def router(servers: int = 3) -> tuple[Router, Clock]:
    clock = Clock()
    return Router([f"s{i}" for i in range(servers)], clock), clock


def test_a_rollout_leaves_a_server_only_when_it_is_overloaded() -> None:
    routed, _ = router(2)
    home = routed.of("mine")
    with ExitStack() as requests:
        for _ in range(SLACK):
            requests.enter_context(routed.lent("mine"))
        assert routed.of("mine") == home
        requests.enter_context(routed.lent("mine"))
        moved = routed.of("mine")
        assert moved != home
    assert routed.of("mine") == moved, "its prefixes are cached there now"


def test_a_server_that_is_away_is_left_alone_and_then_tried_by_one_request_at_a_time() -> None:
    routed, clock = router(2)
    home = routed.of("mine")
    routed.mark(home, away=True)
    assert routed.of("mine") != home
    assert not routed.has_other({next(url for url in ("s0", "s1") if url != home)})
    clock.now = REST
    for each in range(4):  # Rollouts that both servers had had alike.
        routed.of(f"other {each}")
    with ExitStack() as requests:
        chosen = [requests.enter_context(routed.lent(f"new {each}")) for each in range(6)]
        assert chosen.count(home) == 1
        routed.mark(home, away=False)
        chosen = [requests.enter_context(routed.lent(f"newer {each}")) for each in range(6)]
        assert chosen.count(home) > 3


def test_rollouts_are_forgotten_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_ROLLOUTS", 10)
    routed, _ = router(2)
    for each in range(1000):
        routed.of(str(each))
    assert len(routed._home) == 10
    assert sum(server.rollouts for server in routed._servers.values()) == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["answers", "is missed", "time passes"])), max_size=60))
def test_a_request_goes_to_a_server_that_is_there_if_one_is(story: list[tuple[int, str]]) -> None:
    routed, clock = router()
    away: set[str] = set()
    for rollout, event in story:
        with routed.lent(str(rollout)) as url:
            assert url not in away or len(away) == 3
            if event == "answers":
                routed.mark(url, away=False)
                away.discard(url)
            elif event == "is missed":
                routed.mark(url, away=True)
                away.add(url)
            else:
                clock.now += REST
                away.clear()
    assert set(routed.under_way.values()) == {0}


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
        assert stack.server.counters.upstream_errors == 0
        assert [len(await stack.calls(key)) for key in keys] == [4] * 8


@pytest.mark.parametrize("failure", [Drop(), Fail(503)])
async def test_a_reply_that_breaks_off_is_sampled_at_the_other_server(failure: Any) -> None:
    async with two_servers() as (stack, first, second):
        key = await stack.lease()
        first.script(failure)
        await stack.client(key).chat.completions.create(**ASKED)
        assert (len(first.received), len(second.received)) == (1, 1)
        assert len(await stack.calls(key)) == 1


async def test_what_a_server_refuses_is_asked_of_no_other() -> None:
    async with two_servers() as (stack, first, second):
        first.script(Fail(400), Fail(500))
        key = await stack.lease()
        for refused in (openai.BadRequestError, openai.InternalServerError):
            with pytest.raises(refused):
                await stack.client(key).chat.completions.create(**ASKED)
        assert (len(first.received), len(second.received)) == (2, 0)
