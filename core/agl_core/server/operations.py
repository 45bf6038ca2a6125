"""The routes below /agl/v1 as data: what each takes, gives and refuses. They are served and documented from this."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import AglError, StoreRefusedError
from agl_core.server.faults import ApiError, stopping
from agl_core.server.keys import Keys
from agl_core.wire import ErrorReply, Problem
from agl_core.wire.body import Body

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", bound=BaseModel)
Result = TypeVar("Result")


class Right(StrEnum):
    """Whose key a route takes."""

    WORKER = "worker"
    OPERATOR = "operator"
    EITHER = "worker or operator"

    def check(self, keys: Keys, request: Request) -> None:
        """ApiError 401 unless the request carries such a key."""
        checks = {
            Right.WORKER: keys.check_worker,
            Right.OPERATOR: keys.check_operator,
            Right.EITHER: keys.check_worker_or_operator,
        }
        checks[self](request)


REFUSALS: Mapping[int, str] = {
    401: "The key is missing, or is not the right one.",
    413: "The body is too large.",
    422: "The body is not as described; the message names the place.",
    431: "There are too many headers, or too long ones.",
    503: "The store failed, or the server is stopping: the same request may succeed later.",
}
"""What every route may answer besides a success."""


@dataclass(frozen=True, eq=False)
class Operation(Generic[Asked]):
    """One route. `answer` gets the request and its checked body."""

    method: str
    path: str
    right: Right
    body: type[Asked]
    reply: type[BaseModel]
    answer: Callable[[Request, Asked], Awaitable[BaseModel]]
    refusals: Mapping[int, str]
    """Those that it has besides `REFUSALS`."""

    @property
    def summary(self) -> str:
        """What it does, for the documentation."""
        text = (self.answer.__doc__ or "").strip().splitlines()
        return text[0]

    def route(self, keys: Keys) -> Route:
        """It as it is served."""

        async def endpoint(request: Request) -> Response:
            try:
                self.right.check(keys, request)
                reply = await self.answer(request, await _read(request, self.body))
            except AglError as error:
                return refused(error)
            except Exception:
                logger.exception("The server failed in %s %r", request.method, request.url.path)
                return refused(ApiError(500, "agl's server failed; its log says why.", code="server_failed"))
            return Response(reply.model_dump_json(), media_type="application/json")

        return Route(self.path, endpoint, methods=[self.method])


class NoBody(Body):
    """Nothing is read of the request."""


def operation(
    method: str,
    path: str,
    right: Right,
    body: type[Asked],
    reply: type[BaseModel],
    answer: Callable[[Request, Asked], Awaitable[BaseModel]],
    refusals: Mapping[int, str] | None = None,
) -> Operation[Asked]:
    """One route below /agl/v1."""
    return Operation(method, f"/agl/v1{path}", right, body, reply, answer, refusals or {})


Operations = Sequence[Operation[Any]]


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of what may wait; ends it if the client goes away meanwhile, so that it gets nothing."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise stopping()  # nobody reads it
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, kind: type[Asked]) -> Asked:
    if kind is NoBody:
        return kind()
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise ApiError(422, f"{request.url.path}: {problems}", code="invalid_body") from error


def refused(error: AglError) -> Response:
    """The answer to a request that is wrong (its own status), or that the store refused (422), or failed at (503)."""
    status, code, headers = 503, None, {}
    if isinstance(error, ApiError):
        status, code, headers = error.status, error.code, error.headers
    elif isinstance(error, StoreRefusedError):
        status, code = 422, "refused"
    body = ErrorReply(error=Problem(message=str(error), type=type(error).__name__, code=code))
    return Response(body.model_dump_json(), status_code=status, headers=headers, media_type="application/json")
