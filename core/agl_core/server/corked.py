"""uvicorn's HTTP, with one system call for a reply instead of two."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class CorkedHttp(HttpToolsProtocol):
    """Sends a reply's head and body together: each sending wakes up the other side, which costs both sides time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport))


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
