"""What workers ask of the server: leases, and how attempts ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import AglError
from agl_core.server.attempts import attempt_key
from agl_core.server.faults import ApiError
from agl_core.server.keys import Keys
from agl_core.server.queue import RolloutQueue
from agl_core.types import Json
from agl_core.wire import CloseRequest, HeartbeatRequest, LeaseReply, LeaseRequest

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class Management:
    """The routes below /agl/v1; errors are `{"error": {"message", "type", "code"}}`."""

    def __init__(self, queue: RolloutQueue, *, keys: Keys, counters: Callable[[], Mapping[str, int]]) -> None:
        self._queue, self._keys, self._counters = queue, keys, counters

    @property
    def routes(self) -> list[Route]:
        return [
            _route("/agl/v1/leases", "POST", self._lease),
            _route("/agl/v1/heartbeats", "POST", self._heartbeat),
            _route("/agl/v1/rollouts/{rollout}/attempts/{attempt}/close", "POST", self._close),
            _route("/agl/v1/health", "GET", self._health),
        ]

    async def _lease(self, request: Request) -> Response:
        return _json(await self._lease_while_connected(request, await self._body(request, LeaseRequest)))

    async def _heartbeat(self, request: Request) -> Response:
        return _json(self._queue.heartbeat(await self._body(request, HeartbeatRequest)))

    async def _close(self, request: Request) -> Response:
        body = await self._body(request, CloseRequest)
        rollout, number = request.path_params["rollout"], request.path_params["attempt"]
        key = attempt_key(rollout, number)
        if key is None:
            raise ApiError(404, f"There is no attempt {number!r} of rollout {rollout!r}.", code="attempt_unknown")
        return _json(await self._queue.close_attempt(key, body))

    async def _health(self, request: Request) -> Response:
        self._keys.check_worker(request)
        queue = self._queue
        state: dict[str, Json] = {
            "status": "ok",
            "queued": queue.queued,
            "running": queue.running,
            "waiting": queue.waiting,
            "counters": dict(self._counters()),
        }
        return Response(orjson.dumps(state), media_type="application/json")

    async def _lease_while_connected(self, request: Request, body: LeaseRequest) -> LeaseReply:
        """Lend nothing to a worker that went away while it waited."""
        lease = asyncio.create_task(self._queue.lease(body))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({lease, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not lease.done():
                return LeaseReply(leases=[], closed=False)
            return lease.result()
        finally:
            gone.cancel()
            lease.cancel()

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        self._keys.check_worker(request)
        try:
            return kind.model_validate_json(await request.body())
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()
            )
            raise ApiError(422, f"{request.url.path}: {problems}", code="invalid_body") from error


def _route(path: str, method: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except AglError as error:
            return _error(error)
        except Exception:
            logger.exception("The server failed in %s %r", request.method, request.url.path)
            return _error(ApiError(500, "agl's server failed; its log says why.", code="server_failed"))

    return Route(path, endpoint, methods=[method])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _error(error: AglError) -> Response:
    """The request is wrong (its own status), or the store failed (503)."""
    status, code = (error.status, error.code) if isinstance(error, ApiError) else (503, None)
    content = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
