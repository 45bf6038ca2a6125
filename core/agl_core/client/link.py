"""Whether the server can be reached, as all parts of a worker or trainer know it together."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agl_core.client.api import UnreachableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 10.0


class Link:
    """Says once that the server is gone and once that it is back; for any thread."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._lock = threading.Lock()
        self._gone_since: float | None = None

    def failed(self, error: Exception) -> None:
        """The server could not be reached."""
        with self._lock:
            is_new = self._gone_since is None
            self._gone_since = self._gone_since or time.monotonic()
        if is_new:
            logger.warning("%s Trying again until it answers.", error)

    def worked(self) -> None:
        """The server answered."""
        with self._lock:
            since, self._gone_since = self._gone_since, None
        if since is not None:
            logger.warning(
                "The Lightning Server at %s is back after %.0f seconds.", self._base_url, time.monotonic() - since
            )


async def persistently(
    link: Link, ask: Callable[[], Coroutine[Any, Any, Result]], gives_up: Callable[[], bool] = lambda: False
) -> Result:
    """The server's answer, however long it takes to be back; UnreachableError once `gives_up` says so."""
    backoff = Backoff()
    while True:
        try:
            answer = await ask()
        except UnreachableError as error:
            link.failed(error)
            if gives_up():
                raise
            await asyncio.sleep(backoff.next())
        else:
            link.worked()
            return answer


class Backoff:
    """How long to wait before each next try: twice as long each time, up to ten seconds, and never quite the same."""

    def __init__(self) -> None:
        self._delay = _FIRST_DELAY

    def next(self) -> float:
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY)
        return delay * random.uniform(0.75, 1.25)
