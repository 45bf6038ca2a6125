"""Which of several model servers answers a request: pure bookkeeping, no I/O.

A rollout stays with one server, where the beginning of its prompts is cached. It moves if that server is away, or has
much more to do than another. A new rollout goes to the server with the fewest requests under way.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

OVERLOADED, SLACK = 2, 8
"""A rollout leaves a server that has this many times as many requests as the least busy one, and so many more."""
REST = 5.0
"""Seconds for which a server that could not be reached is left alone. Then it gets one request at a time, until one
succeeds."""
ROLLOUTS_KEPT = 65_536
"""Of so many rollouts the server is remembered; a rollout that is older counts as new."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    under_way: int = 0
    rollouts: int = 0
    """Those that it is remembered for."""
    away_since: float | None = None
    """When it was last missed; None: it answered since."""


class Router:
    """Assigns requests to servers, and learns from what became of them.

    with router.lent(rollout) as url:
        ...  # then router.found(url), or router.missed(url) if it cannot be reached
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = {url: _Server(url) for url in urls}
        self._clock = clock
        self._home: OrderedDict[str, _Server] = OrderedDict()

    @property
    def under_way(self) -> dict[str, int]:
        """How many requests each server has."""
        return {url: server.under_way for url, server in self._servers.items()}

    @contextmanager
    def lent(self, rollout: str, tried: Collection[str] = ()) -> Iterator[str]:
        """A server for one request of a rollout ("" for none), which is part of its load meanwhile.

        `tried`: servers where this request failed; they are chosen only if there is no other.
        """
        server = self._chosen(rollout, tried)
        server.under_way += 1
        try:
            yield server.url
        finally:
            server.under_way -= 1

    def of(self, rollout: str) -> str:
        """A rollout's server, for a request that is no load worth counting."""
        return self._chosen(rollout, ()).url

    def found(self, url: str) -> None:
        """A server answered."""
        self._servers[url].away_since = None

    def missed(self, url: str) -> None:
        """A server cannot be reached, or broke off."""
        self._servers[url].away_since = self._clock()

    def has_other(self, tried: Collection[str]) -> bool:
        """Whether there is a server that a request has not tried, and that may be there."""
        return any(self._may_be_there(server) for url, server in self._servers.items() if url not in tried)

    def _chosen(self, rollout: str, tried: Collection[str]) -> _Server:
        untried = [each for url, each in self._servers.items() if url not in tried] or list(self._servers.values())
        there = [each for each in untried if self._may_be_there(each)] or untried
        least = min(there, key=lambda each: (each.under_way, each.rollouts))
        home = self._home.get(rollout)
        if home is None or home not in there or home.under_way > OVERLOADED * least.under_way + SLACK:
            home = least
        if rollout:
            self._remember(rollout, home)
        return home

    def _may_be_there(self, server: _Server) -> bool:
        if server.away_since is None:
            return True
        return server.under_way == 0 and self._clock() >= server.away_since + REST

    def _remember(self, rollout: str, server: _Server) -> None:
        before = self._home.pop(rollout, None)
        if before is not None:
            before.rollouts -= 1
        self._home[rollout] = server
        server.rollouts += 1
        if len(self._home) > ROLLOUTS_KEPT:
            self._home.popitem(last=False)[1].rollouts -= 1
