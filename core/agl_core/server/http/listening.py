"""An HTTP server on an event loop that is not its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from agl_core.errors import ServerError
from agl_core.server.http.limits import RequestLimits
from agl_core.server.http.protocol import CorkedHttp, Refusals

_GRACEFUL = 5
"""Seconds that requests in flight get at the end."""
_TICK = 1.0
"""Seconds after which the date that replies carry is made anew."""
_LOOK = 0.005
"""Seconds between two looks, at the end, whether the last connection is closed; uvicorn has no event for that."""
_KEEP_ALIVE = 75
"""Seconds an idle connection is kept: longer than clients do (5 in httpx), so that none is closed under a request."""


class Listening:
    """Has a port from the start on, and answers by `app` from `start` to `stop`. ServerError if the port is taken."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._http: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return url_of(self._host, self.port)

    def close(self) -> None:
        """Let go of the port without having served."""
        self._socket.close()

    async def start(self, app: ASGIApp, refusals: Refusals, largest: int | None = None) -> None:
        """Answer from now on; ServerError if that fails. A body of an agent may have `largest` bytes, if given."""
        config = uvicorn.Config(
            RequestLimits(app, largest),
            http=cast(Any, functools.partial(CorkedHttp, refusals=refusals)),
            lifespan="off",
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            log_config=None,
            access_log=False,
            server_header=False,
        )
        self._http = _Uvicorn(config)
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        ready = asyncio.create_task(self._http.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            raise ServerError(f"The Lightning Server did not start at {self.base_url}; its log says why.")

    async def stop(self) -> None:
        """Finish the requests in flight, which get a few seconds, and close the port."""
        if self._http is None or self._serving is None:
            return
        self._http.end()
        await asyncio.gather(self._serving, return_exceptions=True)


def url_of(host: str, port: int) -> str:
    """The URL by which this machine reaches a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn as a guest in a loop that is not its own: it leaves signals alone and says when it listens.

    It ends at once where uvicorn looks ten times a second whether it should, and waits a tenth of a second in any case.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Finish the requests in flight; `serve` returns after that."""
        self._ending.set()

    async def main_loop(self) -> None:
        while not self._ending.is_set():
            await self.on_tick(0)  # The date of replies.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _TICK)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        for connection in [*self.server_state.connections]:
            connection.shutdown()
        try:
            await asyncio.wait_for(self._finished(), _GRACEFUL)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()

    async def _finished(self) -> None:
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"The Lightning Server cannot listen on {host}:{port} ({error.strerror}). "
            + (
                "Another program, perhaps another run, has that port: use port 0 for a free one, or stop the other "
                "program."
                if error.errno == errno.EADDRINUSE
                else "Use an address of this machine, 127.0.0.1 for instance."
            )
        ) from error
    listener.setblocking(False)
    return listener
