"""A TCP proxy that breaks connections: at seeded byte counts it closes, resets, delays or swallows.

with FaultyProxy("http://127.0.0.1:8000", random.Random(7), share=0.2) as proxy:
    ...  # talk to proxy.url instead
proxy.broken  # whose connections broke
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from anyio.from_thread import start_blocking_portal

_CHUNK = 2**16
_LONGEST_DELAY = 1.0
_SWALLOWING = 2.0
"""Seconds after which a connection that swallows everything is reset, as a firewall would."""
_MOST_BYTES = 8_000
"""A connection is kept for several requests: some of its breaks hit a later one."""


@dataclass(frozen=True)
class Break:
    """The fate of a connection after so many bytes, of requests or else of replies."""

    how: Literal["close", "reset", "delay", "swallow"]
    of_requests: bool
    after: int
    delay: float


class FaultyProxy:
    """Carries connections to the host and port of `target`, and breaks this share of them, in a thread of its own.

    One of every few in a row breaks, counted apart for workers and agents: the few of a worker are not all spared.
    """

    def __init__(self, target: str, chance: random.Random, share: float) -> None:
        self.url = ""
        """Like `target`, by way of the proxy; known once it has started."""
        self.broken: set[str] = set()
        """By what the first request of a connection was for: `worker` or `agent`."""
        self._target, self._chance, self._row = urlsplit(target), chance, round(1 / share)
        self._spared: defaultdict[str, list[bool]] = defaultdict(list)
        """The fates of the next connections, by whose they are."""
        self._begun = contextlib.ExitStack()

    def start(self) -> str:
        portal = self._begun.enter_context(start_blocking_portal())
        server = portal.call(asyncio.start_server, self._carry, "127.0.0.1", 0)
        self._begun.callback(portal.call, server.close)
        port = server.sockets[0].getsockname()[1]
        self.url = urlunsplit(self._target._replace(netloc=f"127.0.0.1:{port}"))
        return self.url

    def stop(self) -> None:
        self._begun.close()

    def __enter__(self) -> FaultyProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _drawn(self, whose: str) -> Break | None:
        chance, spared = self._chance, self._spared[whose]
        if not spared:
            spared += [True] * (self._row - 1)
            spared.insert(chance.randrange(self._row), False)
        if spared.pop():
            return None
        return Break(
            how=chance.choice(["close", "reset", "delay", "swallow"]),
            of_requests=chance.random() < 0.5,
            after=int(_MOST_BYTES ** chance.random()),
            delay=chance.uniform(0, _LONGEST_DELAY),
        )

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it breaks."""
        sides, is_reset = [writer], True
        try:
            there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
            sides.append(back)
            first = await reader.read(_CHUNK)
            whose = "worker" if first.startswith(b"POST /agl/") else "agent"
            drawn = self._drawn(whose)
            of_requests = drawn if drawn is not None and drawn.of_requests else None
            pumps = [
                asyncio.create_task(self._pump(reader, back, whose, of_requests, first)),
                asyncio.create_task(self._pump(there, writer, whose, None if of_requests else drawn)),
            ]
            try:
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                is_reset = done.pop().result()
            finally:
                for stream in pumps:
                    stream.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:  # Nobody is there just now, or a side reset the connection.
            pass
        finally:
            for stream in sides:
                _end(stream, is_reset)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        whose: str,
        drawn: Break | None,
        first: bytes = b"",
    ) -> bool:
        """Carry bytes one way, `first` before all others; returns whether the connection is to be reset."""
        carried = 0
        while data := first or await source.read(_CHUNK):
            first = b""
            if drawn is not None and carried + len(data) >= drawn.after:
                before, data = data[: drawn.after - carried], data[drawn.after - carried :]
                self.broken.add(whose)
                sink.write(before)
                await sink.drain()
                if drawn.how in ("close", "reset"):
                    return drawn.how == "reset"
                await asyncio.sleep(_SWALLOWING if drawn.how == "swallow" else drawn.delay)
                if drawn.how == "swallow":
                    return True
                drawn = None
            carried += len(data)
            sink.write(data)
            await sink.drain()
        return False


def _end(side: asyncio.StreamWriter, is_reset: bool) -> None:
    """Close a connection after what was written, or reset it at once."""
    if is_reset:
        connection = side.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.transport.abort()
    else:
        side.close()
