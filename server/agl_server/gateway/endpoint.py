"""HTTP to a model server: kept connections, and replies read whole or as they come.

General HTTP clients take longer to prepare a request than the gateway takes for the rest of a call. `Endpoint` prepares
the common part once, and httptools reads the replies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct
from msgspec.structs import replace

from agl_core.apis.streams import STREAM_TYPE

MAX_UNREAD = 256 << 10
"""Bytes of a streamed reply that may wait for a slow client, before reading from the model server pauses."""
_FIRST_FINAL_STATUS = 200
"""Lower ones are interim."""


class HttpReply(Struct, frozen=True):
    """A reply, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; the last of several."""
    body: bytes
    parts: AsyncGenerator[Any, None] | None = None
    """The body as it comes, if it was asked for so and is an event stream; to be closed."""


class Endpoint:
    """One URL to POST to, with common headers, over connections that carry one request at a time.

    Times are in seconds: `timeout` for a reply, `connect` for a connection, `idle` to keep an unused one: less than the
    server does, which would otherwise close a connection just when a request is sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, connect: float, idle: float) -> None:
        self.under_way = 0
        self.away_since = float("-inf")
        """When it was last missed, unless it answered since."""
        self._url = urlsplit(url)
        self._timeout, self._connect, self._keep = timeout, connect, idle
        target = self._url.path + (f"?{self._url.query}" if self._url.query else "")
        host = self._url.netloc.rpartition("@")[2]
        self._head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\n".encode() + _lines(headers)
        self._idle: deque[tuple[_Connection, float]] = deque()
        self._closed = False

    async def post(self, headers: Mapping[str, str], body: bytes, *, streamed: bool = False) -> HttpReply:
        """The reply; TimeoutError, or OSError if the server is away or breaks off. Cancelling closes the connection.

        A `streamed` reply returns when its body begins; `parts` raises the same errors, with the timeout for each part.
        """
        connection = self._kept() or await self._new()
        late = asyncio.get_running_loop().call_later(self._timeout, connection.fail, TimeoutError())
        try:
            request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, _lines(headers), len(body), body)
            reply = await connection.ask(request, streamed=streamed)
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()
        if connection.is_streaming:
            return replace(reply, parts=self._parts(connection))
        self._keep_for_later(connection)
        return reply

    async def _parts(self, connection: _Connection) -> AsyncGenerator[bytes, None]:
        """The parts of the body under way; the connection is closed unless all are read."""
        try:
            while not connection.is_read:
                async with asyncio.timeout(self._timeout):
                    part = await connection.read()
                yield part
        finally:
            if not connection.is_read:
                connection.close()
            self._keep_for_later(connection)

    def close(self) -> None:
        """Close idle connections, and keep none; what is in flight goes on."""
        self._closed = True
        while self._idle:
            self._idle.pop()[0].close()

    def _kept(self) -> _Connection | None:
        """The connection used last, if it is still good."""
        oldest = asyncio.get_running_loop().time() - self._keep
        while self._idle:
            connection, since = self._idle.pop()
            if connection.is_open and since > oldest:
                return connection
            connection.close()
        return None

    def _keep_for_later(self, connection: _Connection) -> None:
        now = asyncio.get_running_loop().time()
        if self._closed:
            connection.close()
        if connection.is_open:
            self._idle.append((connection, now))
        while self._idle and self._idle[0][1] < now - self._keep:
            self._idle.popleft()[0].close()

    async def _new(self) -> _Connection:
        url = self._url
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect):
                _, connection = await loop.create_connection(
                    _Connection, url.hostname or "", url.port or (80 if self._tls is None else 443), ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {self._connect:g} seconds") from error
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self._url.scheme == "https" else None


class _Connection(asyncio.Protocol):
    """One connection, which closes itself once it cannot carry another request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        """Parts that are not read yet."""
        self._unread = 0
        """Bytes of these, in a streamed reply."""
        self._streamed, self._is_whole, self._status = False, True, 0
        self._broken: OSError | None = None
        self.is_streaming = False
        """True if the reply was asked for as a stream, and is one."""
        self._news: asyncio.Future[None] | None = None
        """Done when more of the reply is there."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def is_read(self) -> bool:
        return self._is_whole and not self._body

    async def ask(self, request: bytes, *, streamed: bool = False) -> HttpReply:
        """The reply; without its body if it streams."""
        self._streamed, self._is_whole, self.is_streaming = streamed, False, False
        self._transport.write(request)
        while not (self._is_whole or self.is_streaming):
            await self._wait()
        return HttpReply(self._status, self._headers, b"" if self.is_streaming else await self.read())

    async def read(self) -> bytes:
        """The body's next part; empty only at its end. OSError if it broke off."""
        while not (self._body or self._is_whole):
            await self._wait()
        parts, self._body = self._body, []
        if self._unread > MAX_UNREAD and self.is_open:
            self._transport.resume_reading()
        self._unread = 0
        return b"".join(parts)

    async def _wait(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"what it sent is no HTTP: {error}"))
        self._wake()

    def eof_received(self) -> None:
        if self._headers and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self.on_message_complete()  # The body ends with the connection.

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(ConnectionError(str(error or "it closed the connection")))

    def fail(self, error: OSError) -> None:
        """End the reply under way with this error."""
        self.close()
        self._broken = self._broken or error
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise RuntimeError("a reply to no request")  # The parser makes it an error of its own.
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        is_event_stream = self._headers.get("content-type", "").startswith(STREAM_TYPE)
        self.is_streaming = self._streamed and self._status == 200 and is_event_stream

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self.is_streaming:
            self._unread += len(data)
            if self._unread > MAX_UNREAD:
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_whole = self._status >= _FIRST_FINAL_STATUS
        if self._is_whole and not self._parser.should_keep_alive():
            self.close()


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines.encode()
