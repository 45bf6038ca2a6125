"""The run that a server serves: of its restarts only the latest is heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from agl_core.protocols import Upstream
from agl_core.server.errors import ApiError, superseded
from agl_core.server.gateway.upstream import Relay
from agl_core.server.rollouts.queue import RolloutQueue
from agl_core.store.interface import Store
from agl_core.types import Run
from agl_core.wire import trainers as wire

SHOWN = 100
"""Running attempts that are named."""


class CurrentRun:
    """What a trainer needs of the server; see `agl_core.training.server.RunControl`. Others ask it over HTTP.

    `name` is the run's; without one, the first that is begun is served. `begun` is called when a trainer has begun it.
    ApiError 409 answers a trainer that another one has replaced.
    """

    def __init__(
        self, name: str | None, store: Store, queue: RolloutQueue, relay: Relay, begun: Callable[[], None]
    ) -> None:
        self.name, self.store, self.queue = name, store, queue
        self.restart: int | None = None
        self.over = False
        """Whether its last step was made."""
        self._relay, self._begun = relay, begun
        self._beginning = asyncio.Lock()

    def check(self) -> None:
        """Nothing: a trainer in this process is always heard."""

    async def take_up(self) -> None:
        """Go on where an earlier server of the run left off; call it before the server listens."""
        if self.name is not None:
            await self.queue.restore(self.name)
            latest = await self._latest(self.name)
            self.restart = None if latest is None else latest.restart

    async def begin(self, request: wire.BeginRequest) -> wire.BeginReply:
        """A trainer begins the next restart; what earlier ones left unfinished ends as lost.

        The same request sent again begins no other one.
        """
        async with self._beginning:
            if self.name is None:
                self.name = request.run
                await self.take_up()
            self.check_run(request.run)
            latest = await self._latest(request.run)
            if latest is None or latest.started != request.started:
                self._relay.withdraw()
                await self.queue.abandon()
                number = 0 if latest is None else latest.restart + 1
                step = None if latest is None else request.resumed_step
                latest = Run(request.run, number, request.started, request.config, step)
                await self.store.put(latest)
            self._begun()
            self.restart = latest.restart
            self.over = False
            self.queue.open()
            return wire.BeginReply(restart=latest.restart)

    async def serve(self, registration: wire.Registration) -> None:
        """Forward model calls to this trainer's engine from now on."""
        self.check_current(registration.restart)
        settings = registration.settings
        upstream = Upstream(
            urls=registration.urls,
            models=registration.models,
            api_key=registration.api_key,
            returns_ids=registration.returns_ids,
            context_length=registration.context_length,
        )
        self.queue.limit(timeout=settings.timeout, attempts=settings.attempts)
        self._relay.versions.update(registration.versions)
        await self._relay.serve(upstream, settings, registration.expires)

    async def publish(self, request: wire.VersionsRequest) -> None:
        self.check_current(request.restart)
        self._relay.versions.update(request.versions)

    async def finish(self, request: wire.FinishRequest) -> None:
        """The trainer stops: rollouts wait for the next one. If the run is over, workers end."""
        self.check_current(request.restart)
        self._relay.withdraw()
        if request.over:
            self.over = True
            self.queue.close()

    async def activity(self) -> wire.Activity:
        now, ended = time.time(), self.queue.ended

        def since(begun: float | None) -> float | None:
            return None if begun is None else max(0.0, now - begun)

        return wire.Activity(
            serving=self._relay.is_there,
            queued=self.queue.queued,
            waiting=self.queue.waiting,
            finished=since(ended),
            running=self.queue.running,
            attempts=[
                wire.RunningAttempt(
                    rollout=each.record.rollout,
                    attempt=each.record.attempt,
                    worker=each.record.worker,
                    running=max(0.0, now - each.record.started),
                    asking=since(min(each.asking.values(), default=None)),
                    answered=since(each.answered),
                )
                for each in self.queue.oldest(SHOWN)
            ],
        )

    def check_run(self, name: str) -> None:
        """ApiError 409 unless this is the run that is served."""
        if name != self.name:
            raise ApiError(
                409,
                f"This server serves the run {self.name!r}, not {name!r}. Resume that one, or start another server "
                f"(`agl serve`) for yours.",
                code="another_run",
            )

    def check_current(self, restart: int) -> None:
        """ApiError 409 unless this is the current restart."""
        if self.restart is None:
            raise ApiError(409, "No trainer has begun a run on this server: begin one first.", code="not_begun")
        if restart != self.restart:
            raise superseded(restart, self.restart)

    def check_not_superseded(self, restart: int | None) -> None:
        """ApiError 409 if a trainer asks and this is no longer its restart."""
        if restart is not None:
            self.check_current(restart)

    async def _latest(self, name: str) -> Run | None:
        runs = [run for run in await self.store.runs() if run.id == name]
        return max(runs, key=lambda run: run.restart, default=None)
