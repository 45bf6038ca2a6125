"""An event loop's time, which a test can put forward."""

from __future__ import annotations

import asyncio


class Clock:
    """`advance` makes everything due that waits on the loop for less than that, and lets it happen."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        real, self._ahead = loop.time, 0.0
        loop.time = lambda: real() + self._ahead  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """Put the time forward, and a bit more, since whoever looks at regular times looks a bit later."""
        for step in (seconds, 0.2):
            self._ahead += step
            for _ in range(20):
                await asyncio.sleep(0)
