"""uvicorn's HTTP, with one system call for a reply instead of two, and limits where it has none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agl_core.server.chat import openai_error
from agl_core.server.faults import ApiError
from agl_core.server.limits import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large

_HEAD_PATIENCE = 30.0
"""Seconds that a client gets for a request's line and headers, from its connection or their first byte on."""
_MOST_AHEAD = 32
"""Requests that a client may send over one connection before it has the reply to the first one."""


class CorkedHttp(HttpToolsProtocol):
    """Sends a reply's head and body together: each sending wakes up the other side, which costs both sides time.

    Whoever connects, with a key or without, can have it keep only so much: it closes a connection whose client sends
    more than `MAX_HEAD_BYTES` that are no part of a body (a head, a chunk's extension, trailers), takes long over a
    head, or sends many requests without waiting for replies.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._in_head, self._unread = True, 0
        self._late: asyncio.TimerHandle | None = None
        super().connection_made(CorkedTransport(transport))
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > MAX_HEAD_BYTES:
            self._refuse(head_too_large())
        elif self._in_head and self._unread and self._late is None:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        is_trailer = not self._in_head
        if not is_trailer and len(self.headers) <= MAX_HEADERS:  # One more shows that there are too many.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._unread = False, 0
        self._head_came()
        if len(self.pipeline) >= _MOST_AHEAD:
            raise RuntimeError("too many requests ahead of their replies")  # The parser makes it a reply of 400.
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._unread = True, 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._late = self.loop.call_later(_HEAD_PATIENCE, self._is_late)

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if self._unread:
            self._refuse(ApiError(408, f"The request's headers did not come in {_HEAD_PATIENCE:g} seconds."))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Say why, unless that would go into the midst of a reply, and hang up."""
        self._head_came()
        if self.cycle is None or self.cycle.response_complete:
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
            self._loop.call_soon(self._send)
        self._held.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._send()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():  # The client may have hung up in between.
            self._transport.write(b"".join(held))
