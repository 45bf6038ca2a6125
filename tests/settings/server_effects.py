"""Effects of where the Lightning Server listens, and of how long workers keep what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import httpx
from aiohttp import web

from agl_core.cli.screen import Screen, shown
from agl_core.server import LightningServer
from agl_core.testing import episodes as make
from agl_core.testing.upstream import served
from agl_core.training.metrics import Observer
from agl_core.training.server import local_server, new_run_dir
from agl_core.training.session import open_session
from agl_core.wire.keys import SERVER_FILE
from agl_core.wire.workers import LeaseRequest

from .settings_bench import Bench, Effect, Given


def _free_port() -> int:
    """One that the system gives to nobody by itself until it is used."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


PORT = _free_port()
OTHER_PORT = _free_port()
OTHER_URL = f"http://127.0.0.1:{OTHER_PORT}/v1"


def serving(look: Callable[[LightningServer, str], Awaitable[Any]]) -> Callable[[Bench, Given], Awaitable[Any]]:
    """Look at a run's server while it serves; the URL is the one that workers are told in the run's folder."""

    async def observe(bench: Bench, given: Given) -> Any:
        loaded = bench.load(given)
        run_dir = new_run_dir(loaded)
        async with (
            local_server(loaded, run_dir) as server,
            open_session(loaded, run_dir, server, Observer()),
        ):
            told = json.loads((run_dir / SERVER_FILE).read_text())
            assert told["worker_key"] == server.worker_key
            return await look(server, told["base_url"])

    return observe


async def host(server: LightningServer, url: str) -> str | None:
    return urlsplit(url).hostname


async def has_the_port(server: LightningServer, url: str) -> bool:
    return urlsplit(url).port == PORT


async def terms(server: LightningServer, url: str) -> tuple[float, float]:
    """What a lease says of heartbeats."""
    await server.queue.enqueue([make.rollout("a")])
    (lease,) = (await server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
    return lease.heartbeat, lease.expires


async def shows_pages_there(bench: Bench, given: Given) -> bool:
    loaded = bench.load(given)
    screen = Screen()
    with screen.capture() as printed:
        async with shown(new_run_dir(loaded), loaded.config.server, None, screen):
            pass
    return urlsplit(printed.get().split()[-1]).port == PORT


async def passed_on(bench: Bench, given: Given) -> Any:
    """What an agent's request for embeddings comes to: the status, and the key that another server saw."""
    seen: list[str | None] = []

    async def embed(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)

    async def ask(server: LightningServer, url: str) -> Any:
        await server.queue.enqueue([make.rollout("a")])
        (lease,) = (await server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
        headers = {"Authorization": f"Bearer {lease.key}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(f"{url}/v1/embeddings", json={"model": "m", "input": "x"}, headers=headers)
        return reply.status_code, "OTHER_KEY" in os.environ

    with mock.patch.dict(os.environ, {"OTHER_KEY": "the-other-key"}):
        async with served(app, port=OTHER_PORT):
            return await serving(ask)(bench, given), seen


TERMS = serving(terms)
APART: Given = {"workers.embedded": False}

OTHER: Given = {"gateway.passthrough.url": OTHER_URL}

EFFECTS: Mapping[str, Effect] = {
    "server.host": Effect(serving(host), {"server.host": "127.0.0.2"}, APART),
    "server.port": Effect(serving(has_the_port), {"server.port": PORT}, APART),
    "server.view_port": Effect(shows_pages_there, {"server.view_port": PORT}),
    "gateway.passthrough.url": Effect(passed_on, OTHER, APART),
    "gateway.passthrough.api_key_env": Effect(
        passed_on, {"gateway.passthrough.api_key_env": "OTHER_KEY"}, {**APART, **OTHER}
    ),
    "server.lease": Effect(TERMS, {"server.lease": 60.0}, APART),
}
