"""Whether the server can be reached: one answer for all parts of a worker."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agl_core.client.http import FailingError, UnreachableError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 10.0


class Link:
    """Logs once that the server is gone, and once that it is back; for any thread.

    Several parts ask the server at the same time, and it may answer only some of them: with a full disk it takes
    heartbeats and no reports. It is back once it answers every part again.
    """

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._lock = threading.Lock()
        self._failing: set[object] = set()
        self._gone_since: float | None = None

    def failed(self, asker: object, error: Exception) -> None:
        """`asker` could not reach the server, or got a failure."""
        with self._lock:
            if isinstance(error, FailingError):
                self._failing.add(asker)
            else:
                self._failing.discard(asker)
            is_new = self._gone_since is None
            self._gone_since = self._gone_since or time.monotonic()
        if is_new:
            logger.warning("%s Trying again until it answers.", error)

    def ended(self, asker: object) -> None:
        """`asker` asks no more, with or without an answer."""
        with self._lock:
            self._failing.discard(asker)

    def worked(self, asker: object) -> None:
        with self._lock:
            self._failing.discard(asker)
            if self._failing:
                return
            since, self._gone_since = self._gone_since, None
        if since is not None:
            logger.warning(
                "The Lightning Server at %s is back after %.0f seconds.", self._base_url, time.monotonic() - since
            )


async def persistently(
    link: Link, ask: Callable[[], Coroutine[Any, Any, Result]], gives_up: Callable[[], bool] = lambda: False
) -> Result:
    """The server's answer, however long the server is away; UnreachableError once `gives_up` is true."""
    asker, backoff = object(), Backoff()
    try:
        while True:
            try:
                answer = await ask()
            except UnreachableError as error:
                link.failed(asker, error)
                if gives_up():
                    raise
                await asyncio.sleep(backoff.next())
            else:
                link.worked(asker)
                return answer
    finally:
        link.ended(asker)


class Backoff:
    """Seconds to wait before each next try: doubled each time, up to ten, with some randomness."""

    def __init__(self) -> None:
        self._delay = _FIRST_DELAY

    def next(self) -> float:
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY)
        return delay * random.uniform(0.75, 1.25)
