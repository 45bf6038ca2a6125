"""The control plane below /agl/v1: operations as routes, those of workers, and the OpenAPI document of it all."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import AglError, StoreRefusedError
from agl_core.server.attempt import attempt_key
from agl_core.server.errors import ApiError, stopping
from agl_core.server.keys import Keys
from agl_core.server.queue import RolloutQueue
from agl_core.types import AttemptKey
from agl_core.wire.operation import REFUSALS, Answer, Asked, Empty, ErrorReply, Operation, Problem, Right
from agl_core.wire.workers import (
    ACTIVITY,
    CLOSE,
    HEALTH,
    HEARTBEAT,
    LEASE,
    OF_WORKERS,
    Activity,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Owner = TypeVar("Owner")

_SCHEMES: Mapping[str, list[dict[str, list[str]]]] = {Right.EITHER: [{"worker": []}, {"operator": []}]}
"""Whose keys an operation takes, where these are not named like its right."""
_RIGHTS: Mapping[str, str] = {
    "worker": "AGL_WORKER_KEY.",
    "operator": "AGL_OPERATOR_KEY.",
    "lease": "The secret of an attempt's lease.",
    "agent": "The key of an attempt, as its lease brings it.",
}


def worker_routes(
    keys: Keys, queue: RolloutQueue, health: Callable[[], Health], activity: Callable[[], Activity]
) -> list[Route]:
    """The routes of workers; `health` says what the server is doing, `activity` what its rollouts wait for."""

    async def beat(body: HeartbeatRequest) -> HeartbeatReply:
        return queue.heartbeat(body)

    async def look(body: Empty) -> Health:
        return health()

    async def watch(body: Empty) -> Activity:
        return activity()

    def leased(request: Request) -> AttemptKey:
        attempt = attempt_key(request.path_params["rollout"], request.path_params["attempt"])
        keys.check(request, Right.LEASE, attempt)
        assert attempt is not None, "its key was checked"
        return attempt

    return [
        route(LEASE, keys, queue.lease),
        route(HEARTBEAT, keys, beat),
        route_of(CLOSE, leased, queue.close_attempt),
        route(HEALTH, keys, look),
        route(ACTIVITY, keys, watch),
    ]


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
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors())
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


def document(
    agents: Iterable[str],
    prefix: str,
    version: str,
    further: Sequence[Operation[Any, Any]] = (),
    rights: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """OpenAPI 3.1 of all operations, and of the model APIs at the paths `agents`, plain and below `prefix`.

    `further` operations and their `rights` are those of a source of rollouts.
    """
    operations = [*OF_WORKERS, *further]
    models: list[type[BaseModel]] = [ErrorReply]
    for operation in operations:
        models += [operation.body, operation.reply] if operation.has_body else [operation.reply]
    references, schemas = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], ref_template="#/components/schemas/{model}"
    )

    def content(model: Any) -> dict[str, Any]:
        return {"application/json": {"schema": dict(references[model, "validation"])}}

    def described(operation: Operation[Any, Any]) -> dict[str, Any]:
        refusals = {
            status: text
            for status, text in {**REFUSALS, **operation.refusals}.items()
            if operation.has_body or status not in (413, 422)
        }
        body = {"requestBody": {"required": True, "content": content(operation.body)}} if operation.has_body else {}
        return {
            "operationId": operation.name,
            "summary": operation.summary,
            "tags": [str(operation.right)],
            "security": _SCHEMES.get(operation.right, [{str(operation.right): []}]),
            "parameters": _parameters(operation.path),
            **body,
            "responses": {
                "200": {"description": "Done.", "content": content(operation.reply)},
                **{str(s): {"description": refusals[s], "content": content(ErrorReply)} for s in sorted(refusals)},
            },
        }

    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = described(operation)
    for path in (f"{start}{path}" for path in agents for start in (prefix, "")):
        paths[path] = {"get" if path.endswith("/models") else "post": _of_agents(path)}
    schemes = {
        name: {"type": "http", "scheme": "bearer", "description": text} for name, text in {**_RIGHTS, **rights}.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "agl Lightning Server",
            "version": version,
            "description": "Workers run rollouts, operators see what these wait for, and agents make model calls. "
            "Each has a key of its own.",
        },
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": schemes},
    }


def _of_agents(path: str) -> dict[str, Any]:
    """A route of agents. What it takes and gives is what the API that it is compatible with documents."""
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
    return {
        "summary": f"The API of that name, for the agent of an attempt: {path.rpartition('/v1/')[2]}",
        "tags": ["agent"],
        "security": [{"agent": []}],
        "parameters": _parameters(path),
        **({} if path.endswith("/models") else body),
        "responses": {
            "200": {"description": "As in that API."},
            "4XX": {"description": "An error in the shape of that API."},
            "502": {"description": "The model server failed."},
            "503": {"description": "No engine serves a model now; Retry-After says when to try again."},
            "504": {"description": "The model server did not answer in time."},
        },
    }


def _parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
