"""A lean HTTP/1.1 client: POST over connections that are kept, each with one request at a time.

General clients take longer to prepare a request than the gateway takes for all the rest of a call; here what is the
same for every request to a server is prepared once, and httptools reads the replies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

_FIRST_FINAL_STATUS = 200
"""Replies below are interim ones."""


class BrokenReplyError(ConnectionError):
    """The connection ended before the reply did, or what came was no HTTP."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; of those that came several times, the last."""
    body: bytes


class Endpoint:
    """One URL to POST to, with headers that every request has.

    `connect`: seconds to wait for a connection; `idle`: seconds to keep one that is not used. They have to be fewer
    than the server's, which would otherwise close a connection just when a request is sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect: float, idle: float) -> None:
        self._url = urlsplit(url)
        self._connect, self._keep = connect, idle
        target = self._url.path + (f"?{self._url.query}" if self._url.query else "")
        self._head = f"POST {target} HTTP/1.1\r\nHost: {_host(self._url)}\r\n".encode() + _lines(headers)
        self._idle: deque[tuple[_Connection, float]] = deque()
        self._closed = False

    async def post(self, headers: Mapping[str, str], body: bytes) -> HttpReply:
        """The reply. BrokenReplyError if it did not come whole, another OSError if the server cannot be reached.

        If it is cancelled, so is the request: its connection is closed.
        """
        connection = self._kept() or await self._new()
        try:
            request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, _lines(headers), len(body), body)
            reply = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        self._keep_for_later(connection)
        return reply

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
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes) -> asyncio.Future[HttpReply]:
        if not self.is_open:
            raise BrokenReplyError("it closed the connection")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what it sent is no HTTP: {error}")

    def eof_received(self) -> None:
        if self._waiting is not None and self._ends_with_the_connection:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or "it closed the connection"))

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self._parser.should_keep_alive():
            self.close()
        if waiting is not None and not waiting.done():
            waiting.set_result(HttpReply(status, self._headers, b"".join(self._body)))

    @property
    def _ends_with_the_connection(self) -> bool:
        return bool(self._headers) and not {"content-length", "transfer-encoding"} & self._headers.keys()

    def _fail(self, why: str) -> None:
        self.close()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(BrokenReplyError(why))


def _host(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines.encode()
