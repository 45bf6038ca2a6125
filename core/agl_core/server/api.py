"""The control plane below /agl/v1: operations as routes, those of workers, and the OpenAPI document of it all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.server.attempt import attempt_key
from agl_core.server.errors import ApiError, as_answer, openai_error, stopping
from agl_core.server.keys import Keys
from agl_core.server.listening import read_body
from agl_core.server.queue import RolloutQueue
from agl_core.types import AttemptKey
from agl_core.wire.workers import (
    ACTIVITY,
    CLOSE,
    HEALTH,
    HEARTBEAT,
    LEASE,
    OF_WORKERS,
    Activity,
    Answer,
    AnyOperation,
    Asked,
    Empty,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
    Operation,
    Right,
)

Result = TypeVar("Result")
Owner = TypeVar("Owner")


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
        except Exception as error:
            return openai_error(as_answer(error, request.url.path))
        return Response(reply.model_dump_json(), media_type="application/json")

    return Route(operation.path, endpoint, methods=[operation.method])


async def _read(request: Request, operation: Operation[Asked, Any]) -> Asked:
    if not operation.has_body:
        return operation.body()
    try:  # Strict: "1" is no integer, false no number.
        return operation.body.model_validate_json(await read_body(request, operation.largest), strict=True)
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


def document(agents: Iterable[str], prefix: str, version: str, further: Sequence[AnyOperation] = ()) -> dict[str, Any]:
    """OpenAPI 3.1 of all operations, and of the model APIs at the paths `agents`, plain and below `prefix`.

    `further` operations are those of a source of rollouts. What a model API takes and gives is documented elsewhere.
    """
    operations = [*OF_WORKERS, *further]
    models = dict.fromkeys(model for operation in operations for model in (operation.body, operation.reply))
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )

    def content(model: Any) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": dict(references[model, "validation"])}}}

    def described(path: str, key: str, summary: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        return {
            "summary": summary,
            "tags": [key],
            "security": [{"key": []}],
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"\{(\w+)\}", path)
            ],
            **body,
            "responses": {
                "200": {"description": "Done.", **reply},
                "default": {"description": "An object `error`, whose message says what was wrong, and what to do."},
            },
        }

    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        words = ((operation.body if operation.has_body else operation.reply).__doc__ or "").partition("\n")[0]
        body = {"requestBody": {"required": True, **content(operation.body)}} if operation.has_body else {}
        paths.setdefault(operation.path, {})[operation.method.lower()] = described(
            operation.path, f"key: {operation.right}", words, body, content(operation.reply)
        )
    for path in (f"{start}{path}" for path in agents for start in (prefix, "")):
        words = f"The API of that name, for the agent of an attempt: {path.rpartition('/v1/')[2]}"
        paths[path] = {"get" if path.endswith("/models") else "post": described(path, "key: attempt", words, {}, {})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agl Lightning Server", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
