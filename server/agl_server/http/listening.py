"""HTTP below the routes: uvicorn's protocol on an event loop that is not its own, and limits that it lacks.

httptools and uvicorn read requests and write replies. This module bounds the memory that a client can take, with a key
or without, and tells the gateway whether a reply left for its client.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import socket
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

import httptools
import orjson
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from agl_core.apis.errors import ApiError, openai_problem
from agl_core.errors import ServerError
from agl_core.types import AttemptKey
from agl_core.types.forms import count_values
from agl_core.wire import MAX_VALUES

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_HEAD_BYTES = 96 << 10
"""A larger request line with headers closes the connection."""
MAX_PIPELINED_REQUESTS = 32
"""Requests that a client may send over one connection before the first reply."""
REQUEST_TIMEOUT = 30.0
"""Seconds for a whole request, from the connection or the request's first byte on."""
BODY_BYTES_PER_SECOND = 16 << 10
"""Slowest accepted upload; extends `REQUEST_TIMEOUT`."""
CONNECTION = "agl.connection"
"""Key of a request's `HttpConnection` in its scope."""
MAX_AGENT_BODY = 64 << 20
"""Bytes of an agent's request: images and audio need space."""
HELD_BODY = "agl.body"
"""Key of a request's `HeldBody` in its scope."""
MAX_HELD_OF_ATTEMPT, MAX_HELD = 128 << 20, 2 << 30
"""Weight of unanswered bodies: of one attempt, and of all requests."""
_VALUE_WEIGHT, _SMALL_WEIGHT = 100, 33
"""Bytes in memory: of a JSON value, and for each byte of a small body, whose values are not counted."""
_SMALL, _LARGE = 4 << 10, 1 << 20
"""Bytes up to which a body is small, and from which on it is unpacked and scanned off the event loop."""
_UNSENT = 0.01
"""Seconds between two looks at unsent bytes."""
_GRACEFUL = 5.0
"""Seconds for requests in flight at the end."""
_LOOK = 0.005
"""Seconds between two looks for open connections at the end; uvicorn has no event for that."""
_KEEP_ALIVE = 75
"""Seconds an idle connection is kept: longer than by clients (5 in httpx), so that none is closed under a request."""


class HttpServer:
    """Serves `app` on a socket, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener, self._state = listener, ServerState()
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            proxy_headers=False,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
        self._config.load()

    async def start(self) -> None:
        # uvicorn's Server would take signals, and poll ten times a second whether it should end.
        connect = functools.partial(HttpConnection, self._config, self._state, {})
        self._server = await asyncio.get_running_loop().create_server(connect, sock=self._listener)

    async def stop(self) -> None:
        """Close the port, and give requests in flight a few seconds."""
        self._server.close()
        for connection in [*self._state.connections]:
            connection.shutdown()
        try:
            async with asyncio.timeout(_GRACEFUL):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            for task in self._state.tasks:
                task.cancel()


def url_of(host: str, port: int) -> str:
    """The URL by which this machine reaches a server on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, for port 0 on a free one; ServerError."""
    # asyncio sets TCP_NODELAY only where the protocol is named; without it a body waits 40 ms for its head.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"agl cannot listen on {host}:{port} ({error.strerror}). "
            + (
                "Another program, perhaps another run, has that port: use port 0 for a free one, or stop the other "
                "program."
                if error.errno == errno.EADDRINUSE
                else "Use an address of this machine, 127.0.0.1 for instance."
            )
        ) from error
    listener.setblocking(False)
    return listener


class HttpConnection(HttpToolsProtocol):
    """Closes the connection of a client that sends no HTTP, too large a head, or too many requests, or is too slow.

    A head is all outside of bodies: request line, headers, a chunk's extension, trailers.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head, self._unread, self._body = True, 0, 0
        self._late: asyncio.TimerHandle | None = None
        self._lost, self._broke = False, False
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._lost, self._broke = True, exc is not None
        super().connection_lost(exc)

    @property
    def is_gone(self) -> bool:
        return self._lost or self.transport.is_closing()

    def reply(self, response: Response, send: Send) -> None:
        """Send a whole reply, faster than by ASGI's messages and checks."""
        cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]  # uvicorn's state of the exchange
        closes = b"" if cycle.keep_alive else b"connection: close\r\n"
        head = b"".join([b"%b: %b\r\n" % header for header in response.raw_headers])
        if head.count(b"\n") != len(response.raw_headers):
            raise ValueError("a header has a line break in it")
        self.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[response.status_code], head, closes, bytes(response.body)))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    async def has_left(self) -> bool:
        """Wait until all that was written has left for the client; False if the connection broke before."""
        for _ in range(2):  # uvloop tells of a break in a later turn.
            await asyncio.sleep(0)
        while not self._lost and self.transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(_UNSENT)
        return not self._broke

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"This is no HTTP request: {error}.", code="invalid_http"))
        except httptools.HttpParserUpgrade:
            pass  # It is answered as a request without an upgrade.
        if self.transport.is_closing():
            return
        if self._unread > MAX_HEAD_BYTES:
            problem = f"The request's URL and headers have more than {MAX_HEAD_BYTES >> 10} KiB."
            self._refuse(ApiError(431, problem, code="headers_too_large"))
        elif self._late is None and (self._unread or not self._in_head):
            self._expect()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Else it is a trailer.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise RuntimeError("too many requests ahead of their replies")
        super().on_headers_complete()
        self._in_head, self._unread = False, 0

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._unread, self._body = True, 0, 0
        self._arrived()
        super().on_message_complete()

    def _expect(self) -> None:
        """A request that has begun to come has to be whole in time."""
        self._begun = self.loop.time()
        self._late = self.loop.call_later(REQUEST_TIMEOUT, self._is_late)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        """A body has its time while a route waits for it; one that is read by none is not waited for any longer."""
        self._late = None
        seconds = self._begun + REQUEST_TIMEOUT + self._body / BODY_BYTES_PER_SECOND - self.loop.time()
        if self._in_head and not self._unread:
            self.transport.close()
        elif self.flow.read_paused:  # The server takes its time, not the client.
            self._expect()
        elif seconds > 0 and not self._in_head and not self.cycle.response_complete:
            self._late = self.loop.call_later(seconds, self._is_late)
        else:
            what = "headers" if self._in_head else "body"
            self._refuse(ApiError(408, f"The request's {what} did not come in time."))

    def _refuse(self, error: ApiError) -> None:
        """Say why, if the client waits for nothing else, and hang up."""
        self._arrived()
        logger.debug("A request was refused: %s", error)
        if self._in_head:
            nothing_else = self.cycle is None or self.cycle.response_complete
        else:
            nothing_else = not self.cycle.response_started and not self.pipeline
        if nothing_else:
            body = orjson.dumps(openai_problem(error))
            head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class HeldBody:
    """The memory of one request's body, from its first byte until the request is answered."""

    def __init__(self, weights: dict[AttemptKey | None, int]) -> None:
        self._weights, self._weight = weights, 0
        self.attempt: AttemptKey | None = None
        """The attempt that sent it, if any; set before `add`."""

    def add(self, weight: int) -> None:
        """Hold more; ApiError if that is too much for the attempt, or for all requests."""
        self._weight += weight
        in_all = self._hold(None, weight)
        if self.attempt is not None and self._hold(self.attempt, weight) > MAX_HELD_OF_ATTEMPT:
            problem = "The requests of this attempt that are not answered yet are too large together"
            raise ApiError(429, f"{problem}: wait for replies.", code="too_much_in_flight", retry_after=5)
        # Ordinary requests go on where large ones fill the common space.
        if in_all > MAX_HELD * (1 if self._weight > _LARGE else 2):
            problem = "The server holds too many large requests: this one may be sent again."
            raise ApiError(503, problem, type="server_error", code="too_much_in_flight", retry_after=5)

    def release(self) -> None:
        for holder in {self.attempt, None}:
            if not self._hold(holder, -self._weight):
                del self._weights[holder]

    def _hold(self, holder: AttemptKey | None, weight: int) -> int:
        self._weights[holder] = held = self._weights.get(holder, 0) + weight
        return held


async def read_body(
    request: Request,
    most: int | None = None,
    attempt: AttemptKey | None = None,
    *,
    count_values: Callable[[bytes, int], int] | None = count_values,
) -> bytes:
    """The body of a request, decoded and held for `attempt`; ApiError if it is too large, or breaks off.

    It may have `most` bytes, by default an agent's maximum, and `MAX_VALUES` JSON values by `count_values` (None: no
    JSON), as parsing makes an object of each. A body that announces more bytes is not read.
    """
    most = MAX_AGENT_BODY if most is None else most
    held: HeldBody = request.scope[HELD_BODY]
    held.attempt = attempt
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and len(announced) < 20 and int(announced) > most:
        raise body_too_large(most)
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client hung up before its request was whole.", code="hung_up")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if more or size > _SMALL:
            held.add(len(parts[-1]))
        if size > most:
            raise body_too_large(most)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "gzip":
        body = await _decompressed(body, most, held)
    elif encoding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {encoding!r} is not known here: send gzip or none.")
    if len(body) <= _SMALL:
        held.add(_SMALL_WEIGHT * len(body))
    elif count_values is not None:
        count = functools.partial(count_values, body, MAX_VALUES)
        values = count() if len(body) <= _LARGE else await asyncio.to_thread(count)
        if values > MAX_VALUES:
            raise ApiError(413, f"The request body has more than {MAX_VALUES:,} JSON values.", code="body_too_large")
        held.add(_VALUE_WEIGHT * values)
    return body


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`; if the client goes away meanwhile, it is cancelled, and ApiError raised."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client went away.")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _decompressed(body: bytes, most: int, held: HeldBody) -> bytes:
    inflater, pieces, size = zlib.decompressobj(wbits=31), list[bytes](), 0
    while not inflater.eof:
        try:
            pieces.append(await asyncio.to_thread(inflater.decompress, body, _LARGE))
        except zlib.error as wrong:
            raise ApiError(400, f"The body is not gzip, although its Content-Encoding says so ({wrong}).") from wrong
        body = inflater.unconsumed_tail
        size += len(pieces[-1])
        held.add(len(pieces[-1]))
        if size > most:
            raise body_too_large(most)
        if not (pieces[-1] or inflater.eof):
            raise ApiError(400, "The gzip body is cut off.")
    return b"".join(pieces)


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_response(error: ApiError, body: Mapping[str, Any] | None = None) -> Response:
    """An error's answer; its body is by default OpenAI's."""
    return json_response(body or openai_problem(error), error.status, error.headers)


def body_too_large(most: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {most >> 20} MiB.", code="body_too_large")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop's event loop, which takes less of every request's time.

    The garbage collector ignores all that was imported, and waits for more new objects than some thousand calls in
    flight have, since these nearly all go with their call. It rarely does a full pass, which takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(100_000, before[1], 1000)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*before)
