"""Operations of the control plane as routes: the key, the body and the errors of each are handled here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import AglError, StoreRefusedError
from agl_core.server.errors import ApiError, stopping
from agl_core.server.keys import Keys
from agl_core.wire.body import ErrorReply, Problem
from agl_core.wire.operation import Answer, Asked, Operation, Right

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Owner = TypeVar("Owner")


def route(
    operation: Operation[Asked, Answer], keys: Keys, answer: Callable[[Asked], Coroutine[Any, Any, Answer]]
) -> Route:
    """The route of an operation; `answer` gets the checked body."""
    return route_of(
        operation, lambda request: keys.check(request, Right(operation.right)), lambda _, body: answer(body)
    )


def route_of(
    operation: Operation[Asked, Answer],
    owner_of: Callable[[Request], Owner],
    answer: Callable[[Owner, Asked], Coroutine[Any, Any, Answer]],
) -> Route:
    """The route of an operation whose key belongs to somebody: `answer` gets that too.

    `owner_of` raises ApiError 401 for a request without the right key.
    """

    async def endpoint(request: Request) -> Response:
        try:
            owner = owner_of(request)
            work = answer(owner, await _read(request, operation))
            reply = await (unless_gone(request, work) if operation.waits else work)
            if reply is None:
                raise stopping()  # No client waits for it.
        except AglError as error:
            return refused(error)
        except Exception:
            logger.exception("The server failed in %s %r", request.method, request.url.path)
            return refused(ApiError(500, "agl's server failed; its log says why.", code="server_failed"))
        return Response(reply.model_dump_json(), media_type="application/json")

    return Route(operation.path, endpoint, methods=[operation.method])


async def _read(request: Request, operation: Operation[Asked, Any]) -> Asked:
    if not operation.has_body:
        return operation.body()
    try:  # Strict: "1" is no integer, false no number.
        return operation.body.model_validate_json(await request.body(), strict=True)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise ApiError(422, f"{request.url.path}: {problems}", code="invalid_body") from error


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of what may wait; None, and the work is given up, if the client goes away meanwhile."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def refused(error: AglError) -> Response:
    """The answer to a request that is wrong (its own status), or that the store refused (422), or failed at (503)."""
    status, code, headers = 503, None, {}
    if isinstance(error, ApiError):
        status, code, headers = error.status, error.code, error.headers
    elif isinstance(error, StoreRefusedError):
        status, code = 422, "refused"
    body = ErrorReply(error=Problem(message=str(error), type=type(error).__name__, code=code))
    return Response(body.model_dump_json(), status_code=status, headers=headers, media_type="application/json")
