"""Telling a client's own retry of a call from a second, equal call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from starlette.datastructures import Headers

from agl_core.server.gateway.reply import RawReply, Reply
from agl_core.types import Call, Json
from agl_core.wire.headers import HEADER_RETRY

HEADER_STAINLESS = "x-stainless-retry-count"
"""OpenAI's and Anthropic's SDKs count their retries in it, from 0."""


KEPT = 1000
"""So many exchanges of an attempt that are over are kept for retries; older ones are forgotten."""
KEPT_BYTES = 64 << 20
"""And so many bytes of replies, as the upstream sent them."""


class Client(Protocol):
    """The connection over which a request came."""

    @property
    def is_gone(self) -> bool:
        """Whether it was closed."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One call and everything the client sent to get its reply."""

    sequence: int
    digest: bytes
    """Of the request."""
    marker: str | None
    """The value of `x-agl-retry`, if the client sent one."""
    tries: int = 0
    """The highest retry count seen."""
    supersedes: Call | None = None
    """What an earlier server recorded of it, without its client getting the reply."""
    call: Call | None = None
    """The call as it was recorded; None before, and if it does not count."""
    waiting: list[Client] = field(default_factory=list)
    """The clients that asked for it."""
    arrived: bool = False
    """Whether one of them got the reply."""
    reply: asyncio.Future[Reply] | None = None
    """Of the call in flight; None before and after, so that a retry of one that failed asks the upstream again."""
    kept: RawReply | None = None
    """The reply, once it is there."""


@dataclass(slots=True, eq=False)
class RetryBook:
    """The latest exchanges of one attempt."""

    _by_marker: dict[str, Exchange] = field(default_factory=dict)
    _by_body: dict[bytes, list[Exchange]] = field(default_factory=dict)
    _recorded: list[Call] = field(default_factory=list)
    _over: dict[Exchange, int] = field(default_factory=dict)
    """Those that are over, with their sizes, in that order."""
    size: int = 0
    """Bytes of their replies."""

    def find(self, api: str, headers: Headers, body: bytes) -> Exchange | None:
        """The exchange that this request retries; None if it is a call of its own.

        Only the client's own marker makes a retry: `x-agl-retry`, or an SDK's count of its retries. Of several
        equal calls, a retry with count k claims the oldest one of those that were last tried with a smaller
        count, nearest to k, so that each keeps its own retries.
        """
        marker, count = headers.get(HEADER_RETRY), retry_count(headers)
        if marker is not None:
            exchange = self._by_marker.get(marker)
            if exchange is not None:
                exchange.tries = max(exchange.tries, count)
            return exchange
        if count == 0:
            return None
        equal = [each for each in self._by_body.get(_digest(api, body), ()) if each.tries < count]
        if not equal:
            return None
        exchange = max(equal, key=lambda each: each.tries)
        exchange.tries = count
        return exchange

    def add(self, api: str, headers: Headers, body: bytes, sequence: int) -> Exchange:
        """Open an exchange for a call that retries none."""
        marker = headers.get(HEADER_RETRY)
        exchange = Exchange(sequence, _digest(api, body), marker, tries=retry_count(headers))
        if marker is not None:
            self._by_marker[marker] = exchange
        self._by_body.setdefault(exchange.digest, []).append(exchange)
        return exchange

    def ended(self, exchange: Exchange) -> None:
        """It has its reply, or has failed: keep it for a retry, and forget the oldest that are too many."""
        exchange.reply = None
        if exchange not in reversed(self._by_body.get(exchange.digest, [])):  # from the end: it is one of the latest
            return
        size = 0 if exchange.kept is None else len(exchange.kept.body)
        self.size += size - self._over.pop(exchange, 0)
        self._over[exchange] = size
        while len(self._over) > 1 and (len(self._over) > KEPT or self.size > KEPT_BYTES):
            self._forget(next(iter(self._over)))

    def forget(self) -> None:
        """Forget the exchanges that are over."""
        for exchange in [*self._over]:
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        self.size -= self._over.pop(exchange)
        equal = self._by_body[exchange.digest]
        equal.remove(exchange)
        if not equal:
            del self._by_body[exchange.digest]
        if exchange.marker is not None and self._by_marker.get(exchange.marker) is exchange:
            del self._by_marker[exchange.marker]

    def recall(self, calls: Iterable[Call]) -> None:
        """Calls of the attempt that an earlier server recorded.

        It is not known which of the replies arrived. Without a marker, the reply of a call that had ended before
        another one began counts as arrived: an agent may ask the same twice, and what it got must go on to count.
        """
        found = [call for call in calls if not call.late]
        last = max((call.started for call in found), default=0.0)
        self._recorded = [call for call in found if call.retry_of or call.ended >= last][-KEPT:]

    def unanswered(self, api: str, headers: Headers, request: Mapping[str, Json]) -> Call | None:
        """The recorded call that this request, for which there is no exchange, retries; each is given once."""
        marker, count = headers.get(HEADER_RETRY), retry_count(headers)
        for place, call in enumerate(self._recorded):
            same = call.retry_of == marker if marker else count and (call.api, call.request) == (api, request)
            if same:
                return self._recorded.pop(place)
        return None

    def clear(self) -> None:
        self._recorded.clear()
        self._by_marker.clear()
        self._by_body.clear()
        self._over.clear()
        self.size = 0


def retry_count(headers: Headers) -> int:
    """How often the client's SDK has sent this request before."""
    value = headers.get(HEADER_STAINLESS, "0")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


def _digest(api: str, body: bytes) -> bytes:
    return blake2b(body, digest_size=16, person=api.encode()[:16]).digest()
