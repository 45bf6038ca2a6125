"""What workers ask of the server: leases, and how attempts ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from agl_core.errors import AglError, ServerError
from agl_core.server.faults import ApiError
from agl_core.server.keys import check_key
from agl_core.server.queue import RolloutQueue
from agl_core.types import AttemptKey, Json
from agl_core.wire import CloseRequest, LeaseReply, LeaseRequest

Body = TypeVar("Body", bound=BaseModel)


class Management:
    """The routes below /agl/v1; errors are `{"error": {"message", "type", "code"}}`."""

    def __init__(self, queue: RolloutQueue, *, key: str, counters: Callable[[], Mapping[str, int]]) -> None:
        self._queue, self._key, self._counters = queue, key, counters

    async def lease(self, request: Request) -> Response:
        """POST /agl/v1/leases"""
        try:
            return _json(await self._lease_while_connected(request, await self._body(request, LeaseRequest)))
        except AglError as error:
            return _error(error)

    async def close(self, request: Request) -> Response:
        """POST /agl/v1/rollouts/{rollout}/attempts/{attempt}/close"""
        try:
            body = await self._body(request, CloseRequest)
            key = AttemptKey(request.path_params["rollout"], request.path_params["attempt"])
            return _json(await self._queue.close_attempt(key, body))
        except AglError as error:
            return _error(error)

    async def health(self, request: Request) -> Response:
        """GET /agl/v1/health"""
        try:
            self._check_key(request)
        except ApiError as error:
            return _error(error)
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

    def _check_key(self, request: Request) -> None:
        check_key(request, self._key, hint="These routes take the worker key, not the agents' key.")

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        self._check_key(request)
        try:
            return kind.model_validate_json(await request.body())
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()
            )
            raise ApiError(422, f"{request.url.path}: {problems}", code="invalid_body") from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _error(error: AglError) -> Response:
    """The attempt is unknown (404), the request wrong (its own status), or the store failed (503)."""
    status, code = 404 if isinstance(error, ServerError) else 503, None
    if isinstance(error, ApiError):
        status, code = error.status, error.code
    content = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
