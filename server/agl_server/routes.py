"""The server's routes: model calls, operations, models, what is passed on, the OpenAPI document, and other paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import httpx
import orjson
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.apis.dialect import ChatCompletions, Completions, Dialect
from agl_core.apis.errors import ApiError, as_answer
from agl_core.apis.messages import Messages
from agl_core.apis.responses import Responses
from agl_core.config.sections import PassthroughSection
from agl_core.types import AttemptKey
from agl_core.wire import (
    CLOSE,
    HEALTH,
    HEARTBEAT,
    LEASE,
    Activity,
    Answer,
    AnyOperation,
    Asked,
    Empty,
    Operation,
    Right,
)
from agl_server.gateway.attempts import ActiveAttempt
from agl_server.gateway.calls import Gateway
from agl_server.http.keys import Keys, attempt_key, carries, refused_key
from agl_server.http.listening import HELD_BODY, HeldBody, error_response, read_body, unless_gone
from agl_server.queue import RolloutQueue

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/responses/input_tokens": Responses(counts=True),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": Messages(counts=True),
    "/v1/completions": Completions(),
}
PASSED_ON = frozenset(
    {
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/embeddings",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/images/variations",
        "/v1/moderations",
        "/v1/rerank",
    }
)
"""No others: the server's key would let agents reach files, and make other model calls."""
_PATH = re.compile(
    r"(/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?"
    r"(?P<base>(?:/v1|/openai)*(?:/deployments/(?P<deployment>.+?(?=/chat/|/completions|/embeddings)|[^/]+))?)"
    r"(?P<route>/.*[^/])/*"
)
"""A deployment has its model's name, which may have slashes."""
MODELS = "/v1/models"
TRACES = "/v1/traces"
"""A plugin's route, to which agents export spans."""
_RESPONSES = "/v1/responses/"
_BARE = frozenset({*DIALECTS, *PASSED_ON, MODELS, TRACES})
"""Routes also served without /v1."""

Owner = TypeVar("Owner")

_CONNECT, _ANSWER = 10.0, 120.0
"""Seconds to reach the other server, and to wait for it: a batch of embeddings, or an image."""
_SETTING = (
    "To have it served, name a server that does in the run's configuration: [gateway.passthrough] url = "
    '"https://…/v1" and api_key_env = "VARIABLE".'
)


class ModelRoute(NamedTuple):
    route: str
    """Begins with /v1/."""
    parameters: Mapping[str, str]
    """`rollout`, `attempt` and `deployment`, if the path names them."""


def find_route(path: str) -> ModelRoute | None:
    """The route, attempt and deployment that a decoded path names; None if it is of no model API.

    >>> find_route("//openai/deployments/m/chat/completions/")
    ModelRoute(route='/v1/chat/completions', parameters={'deployment': 'm'})
    >>> find_route("/agl/v1/lease") is None
    True
    """
    match = _PATH.fullmatch(re.sub("//+", "/", path) if "//" in path else path)
    if match is None:
        return None
    route = f"/v1{match['route']}"
    if not match["base"] and route not in _BARE and not route.startswith((f"{MODELS}/", _RESPONSES)):
        return None
    named = {name: match[name] for name in ("rollout", "attempt", "deployment") if match[name] is not None}
    return ModelRoute(route, named)


class ModelCalls:
    """Answers model calls, alone or below an attempt's path; `app` answers the rest, with that path's parameters."""

    def __init__(self, app: ASGIApp, gateway: Gateway, passthrough: Passthrough) -> None:
        self._app, self._gateway, self._passthrough = app, gateway, passthrough
        self._bodies: dict[AttemptKey | None, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope[HELD_BODY] = HeldBody(self._bodies)
        try:
            await self._answer(scope, receive, send)
        finally:
            body.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response, target = self._app, find_route(scope["path"])
        if target is not None:
            route, method = target.route, scope["method"]
            request = Request({**scope, "path_params": target.parameters}, receive)
            if method == "POST" and route in DIALECTS:
                await self._gateway.answer(request, send, DIALECTS[route])
                return
            if method == "POST" and route in PASSED_ON:
                response = await self._passthrough.answer(request, route)
            elif method in ("GET", "DELETE") and re.fullmatch(f"{_RESPONSES}[^/]*", route):
                reply_id = route.removeprefix(_RESPONSES)
                response = await self._gateway.kept(request, DIALECTS["/v1/responses"], reply_id)
            scope = {**scope, "path": route, "path_params": target.parameters}
        await response(scope, receive, send)


def worker_routes(keys: Keys, queue: RolloutQueue, activity: Callable[[], Activity]) -> list[Route]:

    async def look(body: Empty) -> Activity:
        return activity()

    def leased(request: Request) -> AttemptKey:
        attempt = attempt_key(request.path_params["rollout"], request.path_params["attempt"])
        if attempt is None or not carries(request, keys.of_lease(attempt)):
            raise refused_key(request, f"This route takes the key of: {Right.LEASE}.")
        return attempt

    return [
        route(LEASE, keys, queue.lease),
        route(HEARTBEAT, keys, queue.heartbeat),
        route_of(CLOSE, leased, queue.close_attempt),
        route(HEALTH, keys, look),
    ]


class OperationRoute(Route):
    """An operation's route, described in the OpenAPI document."""

    def __init__(self, operation: AnyOperation, endpoint: Callable[[Request], Coroutine[Any, Any, Response]]) -> None:
        super().__init__(operation.path, endpoint, methods=[operation.method])
        self.operation = operation


def route(
    operation: Operation[Asked, Answer], keys: Keys, answer: Callable[[Asked], Coroutine[Any, Any, Answer]]
) -> Route:
    """An operation's route; `answer` gets the checked body."""
    return route_of(
        operation, lambda request: keys.check(request, Right(operation.right)), lambda _, body: answer(body)
    )


def route_of(
    operation: Operation[Asked, Answer],
    owner_of: Callable[[Request], Owner],
    answer: Callable[[Owner, Asked], Coroutine[Any, Any, Answer]],
) -> Route:
    """An operation's route whose key has an owner, which `answer` gets too; `owner_of` raises ApiError 401."""

    async def endpoint(request: Request) -> Response:
        try:
            owner = owner_of(request)
            work = answer(owner, await _read(request, operation))
            reply = await (unless_gone(request, work) if operation.waits else work)
        except Exception as error:
            return error_response(as_answer(error, request.url.path))
        return Response(reply.model_dump_json(), media_type="application/json")

    return OperationRoute(operation, endpoint)


async def _read(request: Request, operation: Operation[Asked, Any]) -> Asked:
    if not operation.has_body:
        return operation.body()
    try:  # Strict: "1" is no integer, false no number.
        return operation.body.model_validate_json(await read_body(request, operation.largest), strict=True)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:10])
        raise ApiError(422, f"{request.url.path}: {problems}", code="invalid_body") from error


class Passthrough:
    """Passes embeddings, moderations, speech and images on to the server of `settings`, else to the model server.

    These requests are counted and not recorded, and sent with a key that agents never see.
    """

    def __init__(self, gateway: Gateway, settings: PassthroughSection, api_key: str | None) -> None:
        self._gateway = gateway
        self._url, self._api_key = settings.url, api_key
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, route: str) -> Response:
        attempt: ActiveAttempt | None = None
        try:
            attempt = await self._gateway.attribution.open(request)
            return await self._passed_on(request, route, attempt)
        except ApiError as refused:
            if attempt is not None:
                attempt.count_failure(refused)
            return error_response(refused)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _passed_on(self, request: Request, route: str, attempt: ActiveAttempt) -> Response:
        base, key = self._url, self._api_key
        if base is None:
            destination = self._gateway.current_destination(attempt)
            base, key = destination.client.server_of(attempt.key.rollout), destination.upstream.api_key
        headers = {name: request.headers[name] for name in ("accept", "content-type") if name in request.headers}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{base.rstrip('/')}{route.removeprefix('/v1')}"
        body = await read_body(request, attempt=attempt.key, count_values=None)
        attempt.passed_through[route.removeprefix("/v1/")] += 1
        if self._client is None:
            # The environment's proxy is for servers elsewhere, never for the model server.
            timeout = httpx.Timeout(_ANSWER, connect=_CONNECT)
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=self._url is not None)
        try:
            reply = await self._client.post(url, headers=headers, params=request.query_params, content=body)
        except httpx.TimeoutException as error:
            raise _failed(504, f"The server at {base} did not answer {route} in {_ANSWER:g} seconds.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _failed(502, f"The server at {base} cannot be asked for {route}: {error}.") from error
        status = reply.status_code
        if status in (401, 403) or reply.is_redirect:
            raise _failed(502, f"The server at {base} answered {status} to agl's own request for {route}. {_SETTING}")
        if status in (404, 405, 501) and b"model" not in reply.content:
            text = f"The server at {base} does not serve POST {route}: it answered {status}. {_SETTING}"
            raise ApiError(404, text, type="upstream_error", code="not_served")
        kept = ("content-type", "content-disposition", "retry-after", "x-request-id")
        return Response(reply.content, status, {name: reply.headers[name] for name in kept if name in reply.headers})


def _failed(status: int, message: str) -> ApiError:
    return ApiError(status, message, type="upstream_error", code="passthrough_failed")


def models_routes(gateway: Gateway) -> Sequence[Route]:
    """The list of models, and each, with the fields that either vendor's client wants."""
    started = datetime.now(UTC)
    of_openai = {"object": "model", "created": int(started.timestamp()), "owned_by": "agl"}
    of_anthropic = {"type": "model", "created_at": started, "lifecycle": "active"}

    async def listed(request: Request) -> Response:
        name = request.path_params.get("model")
        try:
            names = sorted(gateway.current_destination(await gateway.attribution.of(request)).upstream.models)
            if name is not None and name not in names:
                raise ApiError(404, f"There is no model {name!r} here.", code="model_not_found")
        except ApiError as error:
            return error_response(error)
        entries = [
            {"id": model, "display_name": model, **of_openai, **of_anthropic}
            for model in (names if name is None else [name])
        ]
        content = {"object": "list", "data": entries, "has_more": False} if name is None else entries[0]
        return Response(orjson.dumps(content), media_type="application/json")

    return [Route(path, listed, methods=["GET"]) for path in (MODELS, f"{MODELS}/{{model:path}}")]


async def unserved(request: Request, error: Exception) -> Response:
    """The error for an unknown path, in the API that it resembles."""
    path, status = request.url.path, error.status_code if isinstance(error, HTTPException) else 404
    target = find_route(path)
    if target is not None and target.route in DIALECTS:  # With POST it would have been a model call.
        status = 405
    message = (
        f"agl does not serve {request.method} {path}. There are POST {', '.join([*DIALECTS, *sorted(PASSED_ON)])}, and "
        "GET /v1/models and /v1/responses/ID, also below an attempt's path; /openapi.json has the others. "
        "Does the base URL end in /v1, as OpenAI's clients want it, or without it, as Anthropic's does?"
    )
    if target is not None and target.route == TRACES and status == 404:
        message = "Spans are taken in by agl's adapter for OpenTelemetry: install it where the Lightning Server runs."
    refused = ApiError(status, message, code="unknown_route")
    resembled = next((dialect for route, dialect in DIALECTS.items() if route in path), None)
    return error_response(refused, None if resembled is None else resembled.problem(refused))


def document(routes: Iterable[BaseRoute], version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of the operations among these routes, without the model APIs."""
    operations = [route.operation for route in routes if isinstance(route, OperationRoute)]
    models = dict.fromkeys(model for operation in operations for model in (operation.body, operation.reply))
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )

    def content(model: Any) -> dict[str, Any]:
        return {"content": {"application/json": {"schema": dict(references[model, "validation"])}}}

    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = {
            "summary": ((operation.body if operation.has_body else operation.reply).__doc__ or "").partition("\n")[0],
            "tags": [f"key: {operation.right}"],
            "security": [{"key": []}],
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"\{(\w+)\}", operation.path)
            ],
            **({"requestBody": {"required": True, **content(operation.body)}} if operation.has_body else {}),
            "responses": {
                "200": {"description": "Done.", **content(operation.reply)},
                "default": {"description": "An object `error`, whose message says what was wrong, and what to do."},
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "agl Lightning Server", "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
