"""An event loop's time, which a test can put forward."""

from __future__ import annotations

import asyncio


class Clock:
    """`advance` makes everything due that waits on the loop for less than that, and lets it happen.

    By itself the time stands still, however long anything takes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._now = loop.time()
        loop.time = lambda: self._now  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Put the time forward, and a bit more, since whoever looks at regular times looks a bit later."""
        for step in (seconds, 0.2):
            self._now += step
            for _ in range(20):
                await asyncio.sleep(0)
