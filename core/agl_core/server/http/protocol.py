"""uvicorn's HTTP, with one system call for a reply instead of two, and limits where it has none."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agl_core.server.dialects.chat import openai_error
from agl_core.server.errors import ApiError
from agl_core.server.http.limits import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large

logger = logging.getLogger(__name__)

_QUIET = 60.0
"""Seconds between two lines of the log about refused requests."""
_HEAD_PATIENCE = 30.0
"""Seconds that a client gets for a request's line and headers, from its connection or their first byte on."""
_BODY_PATIENCE = 30.0
"""Seconds that it gets for a body, and"""
_BODY_RATE = 16 << 10
"""as many more as the body has so many bytes."""
_UNSENT = 0.01
"""Seconds between two looks at what is not sent yet."""
CONNECTION = "agl.connection"
"""In a request's scope: the `CorkedHttp` over which it came."""
_MOST_AHEAD = 32
"""Requests that a client may send over one connection before it has the reply to the first one."""


class Refusals:
    """Counts requests that were no HTTP, too large or too late, and logs them at most once a minute."""

    def __init__(self) -> None:
        self.count = 0
        self._told = 0
        self._last = ""
        self._quiet: asyncio.TimerHandle | None = None

    def add(self, why: str) -> None:
        """A request was refused, and its connection closed."""
        self.count += 1
        self._last = why
        if self._quiet is None:
            self._tell()

    def _tell(self) -> None:
        new, self._told = self.count - self._told, self.count
        logger.warning("Invalid requests: %d (%d since the start). The last one: %s", new, self.count, self._last)
        self._quiet = asyncio.get_running_loop().call_later(_QUIET, self._tell_of_more)

    def _tell_of_more(self) -> None:
        self._quiet = None
        if self.count > self._told:
            self._tell()


class CorkedHttp(HttpToolsProtocol):
    """Sends a reply's head and body together: each sending wakes up the other side, which costs both sides time.

    It bounds what a client can make it keep, with a key or without. It closes a connection whose client sends what is
    no HTTP, sends more than `MAX_HEAD_BYTES` that are no part of a body (a head, a chunk's extension,
    trailers), takes long over a head or a body, or sends many requests without waiting for replies.
    """

    def __init__(self, *args: Any, refusals: Refusals, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refusals = refusals

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head, self._unread, self._body = True, 0, 0
        self._late: asyncio.TimerHandle | None = None
        self._is_gone, self._broke = False, False
        super().connection_made(CorkedTransport(transport))
        self._expect(_HEAD_PATIENCE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        self._is_gone, self._broke = True, exc is not None
        super().connection_lost(exc)

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    async def has_sent(self) -> bool:
        """Wait until what was written has left for the client; False if the connection broke before."""
        cast(CorkedTransport, self.transport).flush()
        while not self._is_gone and self.transport.get_write_buffer_size():  # noqa: ASYNC110
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
            self._refuse(head_too_large())
        elif self._late is None and (self._unread or not self._in_head):
            self._expect(_HEAD_PATIENCE if self._in_head else _BODY_PATIENCE)

    def on_header(self, name: bytes, value: bytes) -> None:
        is_trailer = not self._in_head
        if not is_trailer and len(self.headers) <= MAX_HEADERS:  # One more shows that there are too many.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._came()
        if len(self.pipeline) >= _MOST_AHEAD:
            raise RuntimeError("too many requests ahead of their replies")  # The parser makes it an error of its own.
        super().on_headers_complete()
        self._in_head, self._unread, self._body = False, 0, 0

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._unread = True, 0
        self._came()
        super().on_message_complete()

    def _expect(self, seconds: float) -> None:
        """What has begun to come has to be whole by then."""
        self._begun = self.loop.time()
        self._late = self.loop.call_later(seconds, self._is_late)

    def _came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if not self._in_head:
            self._body_is_late()
        elif self._unread:
            self._refuse(ApiError(408, f"The request's headers did not come in {_HEAD_PATIENCE:g} seconds."))
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        """A body has its time while a route waits for it; one that is read by none is not waited for any longer."""
        left = self._begun + _BODY_PATIENCE + self._body / _BODY_RATE - self.loop.time()
        if self.flow.read_paused:  # The server takes its time, not the client.
            self._expect(_BODY_PATIENCE)
        elif left > 0 and not self.cycle.response_complete:
            self._late = self.loop.call_later(left, self._is_late)
        else:
            self._refuse(ApiError(408, f"The request's body did not come in time: {self._body} bytes of it are here."))

    def _refuse(self, error: ApiError) -> None:
        """Say why, if the client waits for nothing else, and hang up."""
        self._came()
        self._refusals.add(error.message)
        if self._in_head:
            nothing_else = self.cycle is None or self.cycle.response_complete
        else:
            nothing_else = not self.cycle.response_started and not self.pipeline
        if nothing_else:
            body = openai_error(error).body
            head = f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + bytes(body))
        self.transport.close()


if TYPE_CHECKING:
    _Transport = asyncio.Transport
else:  # What asyncio's has would be found before `__getattr__` is asked.
    _Transport = object


class CorkedTransport(_Transport):
    """A transport that writes once in a turn of the event loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.flush()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():  # The client may have hung up in between.
            self._transport.write(b"".join(held))
