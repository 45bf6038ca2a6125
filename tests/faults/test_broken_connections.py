"""Connections that are closed, reset, delayed or swallowed after any number of bytes, on every way there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from agl_core.testing.upstream import ScriptedUpstream
from agl_core.wire.keys import WORKER_KEY

from .fault_checks import check_ended
from .fault_proxy import Direction, FaultyProxy, How
from .fault_run import TinyRun, free_port

STEPS = 6


@pytest.mark.storm
def test_between_worker_and_server_and_between_agent_and_gateway(
    tiny_run: Callable[..., TinyRun], chance: random.Random
) -> None:
    port = free_port()
    with FaultyProxy(f"http://127.0.0.1:{port}", chance, share=0.3) as proxy:
        run = tiny_run(
            server=proxy.url,
            environment={WORKER_KEY: "a-key-of-our-choice"},
            **{"server.port": port, "workers.timeout": 10.0},
        )
        run.start()
        run.until(lambda: {whose for whose, _, _ in list(proxy.done)} == {"worker", "agent"}, "some of both broke")
        steps = run.finish_after(2)
    check_ended(run, steps)


@pytest.mark.storm
def test_between_gateway_and_model_server(tiny_run: Callable[..., TinyRun], seed: int) -> None:
    run = tiny_run(**{"train.steps": STEPS, "engine.ledger": {"seed": seed, "breaking": 0.3}})
    run.start()
    run.finish()
    check_ended(run, STEPS)


async def test_the_proxy_breaks_what_it_says_and_nothing_else(chance: random.Random) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}

    async def ask(url: str) -> str | None:
        """What the server said, over a connection of its own; None if that broke."""
        async with aiohttp.ClientSession() as session:
            try:
                async with session.post(f"{url}/chat/completions", json=body) as reply:
                    return str((await reply.json())["choices"][0]["message"]["content"])
            except (aiohttp.ClientError, ConnectionError):
                return None

    async with ScriptedUpstream() as upstream:
        with FaultyProxy(upstream.url, chance, share=0.5) as proxy:
            said = await asyncio.gather(*(ask(proxy.url) for _ in range(80)))
    assert len(set(said) - {None}) == 1
    assert said.count(None) == sum(times for (_, _, how), times in proxy.done.items() if how is not How.DELAY)
    assert {how for _, _, how in proxy.done} == set(How)
    assert {direction for _, direction, _ in proxy.done} == set(Direction)
