"""The Lightning Server: rollout queue, gateway and plugins' routes behind one port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import islice

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core import hooks
from agl_core.config.sections import GatewaySection, ServerSection
from agl_core.errors import ServerError
from agl_core.plugins import RunHooks
from agl_core.protocols import Upstream
from agl_core.store import Store
from agl_core.types import Run
from agl_core.wire import Activity, RunningAttempt
from agl_server.gateway.attempts import Attribution, Relay, RolloutSource, RunSettings
from agl_server.gateway.calls import Gateway
from agl_server.http.keys import Keys
from agl_server.http.listening import HttpServer, bind, url_of
from agl_server.queue import RolloutQueue
from agl_server.routes import ModelCalls, Passthrough, document, models_routes, unserved, worker_routes

_LISTEN, _GATEWAY = ServerSection(), GatewaySection()
_MAX_SHOWN = 100
"""Running attempts in `activity`."""


class LightningServer:
    """Serves agents and workers from the event loop that starts it.

    Agents reach `base_url` + the attempt's path + /v1 with their attempt's key, workers `base_url`/agl/v1 with
    `worker_key`. `hook` is `Plugins.hook`. Without `upstream`, rollouts wait until `serve` names one. ServerError if
    other machines can reach the host and the user did not choose `keys`.
    """

    def __init__(
        self,
        store: Store,
        upstream: Upstream | None,
        settings: RunSettings,
        hook: RunHooks,
        *,
        listen: ServerSection = _LISTEN,
        gateway: GatewaySection = _GATEWAY,
        keys: Keys | None = None,
        source: RolloutSource | None = None,
        lease: float = 20.0,
    ) -> None:
        keys = keys or Keys()
        keys.check_host(listen.host)
        self.store = store
        self.queue = RolloutQueue(
            store,
            timeout=settings.timeout,
            attempts=settings.attempts,
            hook=hook,
            keys=keys,
            prompts={name: prompt.text for name, prompt in settings.prompts.items() if prompt.text is not None},
            lease=lease,
        )
        self.worker_key = keys.worker
        self.keys, self._host, self._port = keys, listen.host, listen.port
        self.relay = Relay(self.queue.lend)
        self.relay.disconnect()
        self.versions = self.relay.versions
        """By policy: the version being served, for upstreams whose replies do not name it."""
        self._upstream, self._settings = upstream, settings
        self._source = source or RolloutSource()
        attribution = Attribution(keys, self.queue.attempts, self.queue.running, self._source)
        self._gateway = Gateway(attribution, store, self.relay, settings.prompts)
        self._passthrough = Passthrough(self._gateway, gateway.passthrough, keys.passthrough)
        of_plugins = hook.call(hooks.server_routes, store, attribution.leased)
        self._plugins_routes = [route for routes in of_plugins for route in routes or ()]
        self._listening: HttpServer | None = None
        self._watching: list[asyncio.Task[None]] = []

    @property
    def base_url(self) -> str:
        """The server's address, without a path; known once it has started."""
        return url_of(self._host, self._port)

    async def start(self, before: int | None = None) -> None:
        """Listen; with port 0 on the one `before`, if it is free, so that others find the server again. ServerError."""
        try:
            listener = bind(self._host, self._port or before or 0)
        except ServerError:
            if self._port or not before:
                raise
            listener = bind(self._host, 0)
        self._port = listener.getsockname()[1]
        try:
            await self._source.start(self.base_url)
        except BaseException:
            listener.close()
            raise
        if self._upstream is not None:
            self.relay.connect(self._upstream, self._settings)
        self._watching = [asyncio.create_task(self.queue.watch())]
        self._listening = HttpServer(ModelCalls(self._app(), self._gateway, self._passthrough), listener)
        await self._listening.start()

    async def begin(self, run: Run) -> None:
        """Begin this restart of a run: unfinished rollouts of earlier ones end as lost."""
        self.relay.disconnect()
        await self.queue.abandon(run.id)
        await self.store.put(run)

    def serve(self, upstream: Upstream, versions: Mapping[str, int]) -> None:
        """Lend rollouts from now on, with this model server for their calls; `versions` are its policies'."""
        self.versions.update(versions)
        self.relay.connect(upstream, self._settings)

    async def stop(self, *, over: bool = True) -> None:
        """End leases and calls in flight, and close the port. Workers end if the run is `over`, else they wait."""
        listening = self._listening
        if listening is None:
            return
        self._listening = None
        if over:
            self.queue.close()
        self.queue.stop()
        for task in self._watching:
            task.cancel()
        await self._gateway.stop()
        await listening.stop()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._source.stop()
        await self._passthrough.stop()
        self.relay.disconnect()

    async def __aenter__(self) -> LightningServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def activity(self) -> Activity:
        now = time.time()

        def since(begun: float | None) -> float | None:
            return None if begun is None else max(0.0, now - begun)

        return Activity(
            serving=self.relay.is_there,
            queued=self.queue.queued,
            running=len(self.queue.running),
            waiting=self.queue.waiting,
            counters=dict(self._source.counters),
            finished=since(self.queue.ended),
            attempts=[
                RunningAttempt(
                    rollout=attempt.record.rollout,
                    attempt=attempt.record.attempt,
                    worker=attempt.record.worker,
                    running=max(0.0, now - attempt.record.started),
                    asking=since(min(attempt.asking.values(), default=None)),
                    answered=since(attempt.last_answer),
                )
                for attempt in islice(self.queue.running.values(), _MAX_SHOWN)
            ],
        )

    def _app(self) -> Starlette:
        async def openapi(request: Request) -> Response:
            described = document(request.app.routes, version("agl-core"))
            return Response(orjson.dumps(described), media_type="application/json")

        return Starlette(
            routes=[
                *models_routes(self._gateway),
                *self._plugins_routes,
                *worker_routes(self.keys, self.queue, self.activity),
                *self._source.routes,
                Route("/openapi.json", openapi),
            ],
            exception_handlers={404: unserved, 405: unserved},
        )
