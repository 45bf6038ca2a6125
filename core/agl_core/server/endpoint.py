"""HTTP to a model server: connections that are kept, and replies that are read whole or as they come.

General HTTP clients take longer to prepare a request than the gateway takes for all the rest of a call. `Endpoint`
prepares once what is the same for every request, and httptools reads the replies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from agl_core.apis.streams import STREAM_TYPE

MAX_UNREAD = 256 << 10
"""Bytes of a streamed reply that wait for a slow client; until they are fewer, the model server is not read from."""
_FIRST_FINAL_STATUS = 200
"""Replies below are interim ones."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; of those that came several times, the last."""
    body: bytes
    parts: AsyncGenerator[bytes, None] | None = None
    """The body as it comes, if it is an event stream and was asked for like that; it has to be closed."""


class Endpoint:
    """One URL to POST to, with headers that every request has, over connections with one request at a time each.

    Times are in seconds: `timeout` for a reply, `connect` for a connection, `idle` to keep one that is not used.
    The last has to be less than the server's, which would otherwise close a connection just when a request is sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, connect: float, idle: float) -> None:
        self.under_way = 0
        """Requests that it has."""
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
        """The reply. TimeoutError if it takes longer; OSError if it did not come whole, or the server is not there.

        If it is cancelled, so is the request: its connection is closed. A `streamed` reply is there when its body
        begins; `parts` raises the same errors, with the time to wait for each of them.
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
        if streamed and _is_event_stream(reply.status, reply.headers):
            return replace(reply, parts=self._parts(connection))
        self._keep_for_later(connection)
        return reply

    async def _parts(self, connection: _Connection) -> AsyncGenerator[bytes, None]:
        """Of the body under way. A server whose reply is not read to its end sees its connection closed."""
        try:
            while part := await connection.read(self._timeout):
                yield part
        finally:
            if connection.is_streaming:
                connection.close()
            self._keep_for_later(connection)

    def close(self) -> None:
        """Keep no connections any more; what is in flight goes on."""
        self._closed = True
        while self._idle:
            self._idle.pop()[0].close()

    def _kept(self) -> _Connection | None:
        """The connection that was used last, if there is one that is still good."""
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
    """One connection; it closes itself once it cannot carry another request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[Any] | None = None
        """For a reply, or for more of its body."""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._streamed = False
        self.is_streaming = False
        """Whether a body is under way that is read as it comes."""
        self._unread = 0
        """Bytes of it that have not been read yet."""
        self._broken: OSError | None = None
        """Why it came to no end."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes, *, streamed: bool = False) -> asyncio.Future[HttpReply]:
        if not self.is_open:
            raise ConnectionError("it closed the connection")
        self._streamed = streamed
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    async def read(self, timeout: float) -> bytes:
        """What came of the body since the last time; empty at its end. An OSError says why it has none."""
        if self.is_streaming and not self._body:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            late = loop.call_later(timeout, self.fail, TimeoutError())
            try:
                await self._waiting
            finally:
                late.cancel()
        if not self._body and self._broken is not None:
            raise self._broken
        parts, self._body = self._body, []
        if self._unread > MAX_UNREAD and self.is_open:
            self._transport.resume_reading()
        self._unread = 0
        return b"".join(parts)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"what it sent is no HTTP: {error}"))

    def eof_received(self) -> None:
        if (self._waiting is not None or self.is_streaming) and self._ends_with_the_connection:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(ConnectionError(str(error or "it closed the connection")))

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._streamed and self._waiting is not None and _is_event_stream(status, self._headers):
            self.is_streaming = True
            self._answer(HttpReply(status, self._headers, b""))

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self.is_streaming:
            if self._unread <= MAX_UNREAD < self._unread + len(data):
                self._transport.pause_reading()
            self._unread += len(data)
            self._answer(None)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            return
        is_due = self._waiting is not None or self.is_streaming
        if not is_due or not self._parser.should_keep_alive():
            self.close()
        if self.is_streaming:
            self.is_streaming = False
            self._answer(None)
        else:
            self._answer(HttpReply(status, self._headers, b"".join(self._body)))

    @property
    def _ends_with_the_connection(self) -> bool:
        return bool(self._headers) and not {"content-length", "transfer-encoding"} & self._headers.keys()

    def fail(self, error: OSError) -> None:
        """End the request under way with this error."""
        self.close()
        if self.is_streaming:
            self.is_streaming, self._broken = False, error
            self._answer(None)
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self._waiting = None

    def _answer(self, result: HttpReply | None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(result)


def _is_event_stream(status: int, headers: Mapping[str, str]) -> bool:
    return status == 200 and headers.get("content-type", "").startswith(STREAM_TYPE)


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines.encode()
