"""The Lightning Server: rollout queue, gateway and OTLP intake behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.config.models import SamplingSection
from agl_core.errors import ServerError
from agl_core.protocols import Upstream
from agl_core.server.chat import ChatCompletions
from agl_core.server.completions import Completions
from agl_core.server.dialect import Dialect
from agl_core.server.faults import ApiError
from agl_core.server.gateway import Counters, Gateway
from agl_core.server.management import Management
from agl_core.server.messages import Messages
from agl_core.server.otlp import SpanIntake, TraceService, traces_route
from agl_core.server.queue import RolloutQueue
from agl_core.server.responses import Responses
from agl_core.server.upstream import UpstreamClient
from agl_core.store.interface import Store

_GRACEFUL = 5
"""Seconds that requests in flight get at the end."""
_KEEP_ALIVE = 75
"""Seconds an idle connection is kept: longer than clients do (5 in httpx), so that none is closed under a request."""
_PREFIX = "/rollout/{rollout}/attempt/{attempt}"
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    "/v1/completions": Completions(),
}
_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class LightningServer:
    """Serves agents and workers from the event loop that starts it.

    Agents reach `base_url` + the attempt's path + /v1 with `agent_key`, workers `base_url`/agl/v1 with
    `worker_key`. `timeout` is how many seconds an attempt may take, and so a call at most; `attempts` how often a
    rollout is tried; `hook` is `Plugins.hook`; `agents` says which agents a policy answers. Port 0 takes a free one.

    >>> async def example(store, upstream, plugins):
    ...     async with LightningServer(
    ...         store, upstream, sampling=SamplingSection(), seed=0, timeout=120, attempts=2, hook=plugins.hook
    ...     ) as server:
    ...         await server.queue.enqueue([])
    ...         rollout = await server.queue.next_done()
    """

    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        *,
        sampling: SamplingSection,
        seed: int,
        timeout: float,
        attempts: int,
        hook: Any,
        agents: Mapping[str, Sequence[str]] = MappingProxyType({}),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.queue = RolloutQueue(store, timeout=timeout, attempts=attempts, hook=hook)
        self.versions: dict[str, int] = {}
        """The version of each policy, for upstreams whose replies do not tell it; the trainer keeps it."""
        self.agent_key = secrets.token_urlsafe(24)
        self.worker_key = secrets.token_urlsafe(24)
        self._host, self._port = host, port
        self._client = UpstreamClient(upstream, timeout)
        self._gateway = Gateway(
            self.queue,
            store,
            upstream,
            self._client,
            sampling=sampling,
            seed=seed,
            versions=self.versions,
            key=self.agent_key,
            agents=agents,
        )
        self._intake = SpanIntake(self.queue, store)
        self._traces = TraceService(self.queue, self._intake, key=self.agent_key)
        self._http: _Uvicorn | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def base_url(self) -> str:
        """Where the server listens, without a path; known once it has started."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{host}:{self._port}"

    @property
    def counters(self) -> Counters:
        """What the gateway counted since its start."""
        return self._gateway.counters

    async def start(self) -> None:
        """Listen; ServerError if the port is taken."""
        listener = _bind(self._host, self._port)
        self._port = listener.getsockname()[1]
        await self._client.__aenter__()
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACEFUL,
        )
        self._http = _Uvicorn(config)
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        self._tasks = [serving, asyncio.create_task(self.queue.watch())]
        ready = asyncio.create_task(self._http.ready.wait())
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if serving.done():
            await self.stop()
            raise ServerError(f"The Lightning Server did not start at {self.base_url}; its log says why.")

    async def stop(self) -> None:
        """End leases and calls in flight, and close the port; calling it again changes nothing."""
        if self._http is None:
            return
        http, self._http = self._http, None
        serving, watching = self._tasks
        self.queue.close()
        watching.cancel()
        await self._gateway.stop()
        http.should_exit = True
        await asyncio.gather(serving, watching, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    async def __aenter__(self) -> LightningServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _counted(self) -> dict[str, int]:
        spans = {f"otlp_{name}": count for name, count in dataclasses.asdict(self._intake.counters).items()}
        return dataclasses.asdict(self.counters) | spans

    def _app(self) -> Starlette:
        gateway = self._gateway
        management = Management(self.queue, key=self.worker_key, counters=self._counted)
        started = int(time.time())

        def endpoint(dialect: Dialect) -> _Endpoint:
            async def answer(request: Request) -> Response:
                return await gateway.answer(request, dialect)

            return answer

        async def models(request: Request) -> Response:
            try:
                gateway.check_key(request)
            except ApiError as error:
                return _DIALECTS["/v1/chat/completions"].refuse(error)
            listed = [{"id": name, "object": "model", "created": started, "owned_by": "agl"} for name in gateway.models]
            return Response(orjson.dumps({"object": "list", "data": listed}), media_type="application/json")

        async def unknown(request: Request, error: Exception) -> Response:
            path = request.url.path
            ours = next((each for route, each in _DIALECTS.items() if route in path), _DIALECTS["/v1/chat/completions"])
            return ours.refuse(
                ApiError(
                    error.status_code if isinstance(error, HTTPException) else 404,
                    f"agl does not serve {request.method} {path}. There are POST {', '.join(_DIALECTS)} and "
                    f"/v1/traces, and GET /v1/models, also below {_PREFIX}. Does the base URL end in /v1, as OpenAI's "
                    "clients want it, or without it, as Anthropic's does?",
                    code="unknown_route",
                )
            )

        served = [(path, endpoint(dialect), ["POST"]) for path, dialect in _DIALECTS.items()]
        return Starlette(
            routes=[
                *(
                    Route(f"{prefix}{path}", called, methods=methods)
                    for path, called, methods in [*served, ("/v1/models", models, ["GET"])]
                    for prefix in (_PREFIX, "")
                ),
                *(traces_route(f"{prefix}/v1/traces", self._traces) for prefix in (_PREFIX, "")),
                Route("/agl/v1/leases", management.lease, methods=["POST"]),
                Route("/agl/v1/rollouts/{rollout}/attempts/{attempt:int}/close", management.close, methods=["POST"]),
                Route("/agl/v1/health", management.health),
            ],
            exception_handlers={404: unknown, 405: unknown},
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn as a guest in a loop that is not its own: it leaves signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"The Lightning Server cannot listen on {host}:{port} ({error.strerror}). Another program, perhaps "
            f"another run, has that port: use port 0 for a free one, or stop the other program."
        ) from error
    listener.setblocking(False)
    return listener
