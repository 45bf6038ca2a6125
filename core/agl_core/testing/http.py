"""Servers of a test's own on this machine: one application, and a relay before another server."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import aiohttp
from aiohttp import web


@contextlib.asynccontextmanager
async def served(
    app: web.Application, *, port: int = 0, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve an application, on a free port if none is named: its URL, without a slash at the end."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=ssl_context).start()
        yield f"http{'s' if ssl_context else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class Passed:
    """A request that a relay has passed on, and the reply."""

    asked: bytes
    status: int
    reply: bytes
    content_type: str | None
    """The reply's, with its parameters."""

    def response(self) -> web.Response:
        headers = {"Content-Type": self.content_type} if self.content_type else None
        return web.Response(body=self.reply, status=self.status, headers=headers)


class Relay:
    """Stands before a server and passes POST requests on; a subclass keeps them, or loses replies."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.url = ""
        self._serves = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{path:.*}", self.relay)
        self._client = await self._serves.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        self.url = await self._serves.enter_async_context(served(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serves.aclose()

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Answer a request; a subclass overrides this."""
        return (await self.pass_on(request)).response()

    async def pass_on(self, request: web.Request, **headers: str) -> Passed:
        """Ask the server what the client asks, with these headers besides, and hear the reply out."""
        asked = await request.read()
        given = {name: value for name, value in request.headers.items() if name.lower() != "host"} | headers
        async with self._client.post(f"{self._target}{request.path}", data=asked, headers=given) as got:
            return Passed(asked, got.status, await got.read(), got.headers.get("Content-Type"))
