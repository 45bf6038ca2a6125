"""Where model calls are forwarded to: nowhere, until a trainer says where its engine serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from agl_core.protocols import Upstream
from agl_core.server.faults import no_upstream
from agl_core.server.upstream import UpstreamClient
from agl_core.wire.operators import RunSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Served:
    """What answers model calls, and how they are sampled."""

    upstream: Upstream
    settings: RunSettings
    client: UpstreamClient


class Relay:
    """The model server of now. `lend` is told whether there is one, so that rollouts wait while there is none.

    `versions` maps policies to versions, for upstreams that do not tell theirs.
    """

    def __init__(self, lend: Callable[[bool], None]) -> None:
        self.versions: dict[str, int] = {}
        self._lend = lend
        self._served: Served | None = None
        self._is_there = False
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_there(self) -> bool:
        """Whether model calls are answered now."""
        return self._is_there

    def served(self) -> Served:
        """What answers; ApiError 503 if nothing does."""
        if self._served is None or not self._is_there:
            raise no_upstream()
        return self._served

    async def serve(self, upstream: Upstream, settings: RunSettings, expires: float | None) -> None:
        """Forward to this one from now on; for `expires` seconds only, unless this is said again."""
        before = self._served
        if before is None or (before.upstream, before.settings) != (upstream, settings):
            client = await UpstreamClient(upstream, settings.timeout).__aenter__()
            self._served = Served(upstream, settings, client)
            if before is not None:
                await before.client.__aexit__(None, None, None)
        self._disarm()
        if expires is not None:
            self._expiry = asyncio.get_running_loop().call_later(expires, self._expire, expires)
        self._is_there = True
        self._lend(True)

    def withdraw(self) -> None:
        """Forward nowhere; calls in flight go on."""
        self._disarm()
        self._is_there = False
        self._lend(False)

    async def stop(self) -> None:
        """Let go of the connections."""
        self.withdraw()
        served, self._served = self._served, None
        if served is not None:
            await served.client.__aexit__(None, None, None)

    def _expire(self, seconds: float) -> None:
        logger.warning("The trainer was not heard of for %g seconds: rollouts wait until it is back.", seconds)
        self.withdraw()

    def _disarm(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
