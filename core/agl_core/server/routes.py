"""The routes of agents: model calls, found without a router because they are nearly all that a server is asked; what is
passed on without being recorded; the lists of models; and what clients get at other paths.

Clients put together what they are given in many ways: with and without /v1, with slashes too many, and as Azure has it.
`find_route` makes one path of them all.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import httpx
import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.config.models import PassthroughSection
from agl_core.server.attempt import ActiveAttempt
from agl_core.server.dialects.chat import ChatCompletions, Completions
from agl_core.server.dialects.dialect import Dialect
from agl_core.server.dialects.messages import Messages
from agl_core.server.dialects.responses import Responses
from agl_core.server.errors import ApiError, openai_error
from agl_core.server.listening import read_body
from agl_core.wire.headers import HEADER_IGNORED

if TYPE_CHECKING:
    from agl_core.server.gateway import Gateway

logger = logging.getLogger(__name__)

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
"""No other route is passed on: the key would let agents reach files, and make other model calls."""
_MAX_NOTES = 100
"""Different notes that are logged."""
_PATH = re.compile(
    r"(?P<prefix>/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?"
    r"(?P<base>(?:/v1|/openai)*(?:/deployments/(?P<deployment>[^/]+))?)(?P<route>/.*[^/])/*"
)
_MODELS = "/v1/models"
_RESPONSES = "/v1/responses/"
_BARE = frozenset({*DIALECTS, *PASSED_ON, _MODELS, "/v1/traces"})
"""Routes that are also served without /v1."""
_CONNECT, _ANSWER = 10.0, 120.0
"""Seconds until the other server must be reached, and until it must send: a batch of embeddings, or an image."""
_SETTING = (
    "To have it served, name a server that does in the run's configuration: [gateway.passthrough] url = "
    '"https://…/v1" and api_key_env = "VARIABLE".'
)


class ModelRoute(NamedTuple):
    """Where a request goes that may be a model call."""

    path: str
    """As the routes have it."""
    route: str
    """Begins with /v1/."""
    parameters: Mapping[str, str]
    """`rollout`, `attempt` and `deployment`, if the path names them."""


class ModelCalls:
    """Answers POST requests to the dialects' routes, alone or below an attempt's path.

    `passthrough` answers what is passed on, and `app` the rest.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, passthrough: Passthrough) -> None:
        self._app, self._gateway, self._passthrough = app, gateway, passthrough
        self._noted: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = find_route(scope["path"])
        if target is None:
            await self._app(scope, receive, send)
            return
        is_post = scope["method"] == "POST"
        dialect = DIALECTS.get(target.route) if is_post else None
        if dialect is not None:
            request = CallRequest(scope, receive, target)
            response = await self._gateway.answer(request, dialect)
            self._note(target.route, response.headers.get(HEADER_IGNORED))
        elif is_post and target.route in PASSED_ON:
            request = CallRequest(scope, receive, target)
            response = await self._passthrough.answer(request, target.route)
        elif target.route.startswith(_RESPONSES) and scope["method"] in ("GET", "DELETE"):
            request = CallRequest(scope, receive, target)
            reply_id = target.route.removeprefix(_RESPONSES)
            response = await self._gateway.kept(request, reply_id, DIALECTS["/v1/responses"])
        else:
            await self._app({**scope, "path": target.path}, receive, send)
            return
        await response(scope, receive, send)

    def _note(self, route: str, ignored: str | None) -> None:
        """Log once what requests ask for and do not get."""
        if ignored is not None and (note := f"{route}: {ignored}") not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted.add(note)
            logger.warning("Ignored in requests to %s.", note)


class CallRequest(Request):
    """The request of a model call, which is asked for a dozen headers, most of them absent."""

    def __init__(self, scope: Scope, receive: Receive, target: ModelRoute) -> None:
        super().__init__({**scope, "path_params": target.parameters}, receive)
        # Starlette's go through all of them for each name that is looked up.
        self._headers = cast(Headers, {n.decode("latin-1"): v.decode("latin-1") for n, v in reversed(scope["headers"])})

    async def body(self) -> bytes:
        return await read_body(self)


class Passthrough:
    """Passes requests that no policy answers to the server that `settings` name, or else to the model server.

    Agents with retrieval ask for embeddings beside their model calls, others for moderations, speech or images. These
    requests are counted and not recorded; the key that they go on with is one that agents never see.
    """

    def __init__(self, gateway: Gateway, settings: PassthroughSection, api_key: str | None) -> None:
        self._gateway = gateway
        self._url, self._api_key = settings.url, api_key
        self._client: httpx.AsyncClient | None = None

    async def answer(self, request: Request, route: str) -> Response:
        """The other server's reply."""
        attempt: ActiveAttempt | None = None
        try:
            attempt = await self._gateway.attribution.open(request)
            return await self._passed_on(request, route, attempt)
        except ApiError as refused:
            if attempt is not None:
                attempt.count_failure(refused)
            return openai_error(refused)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _passed_on(self, request: Request, route: str, attempt: ActiveAttempt) -> Response:
        base, key = self._url, self._api_key
        if base is None:
            served = self._gateway.served(attempt)
            base, key = served.client.server_of(attempt.key.rollout), served.upstream.api_key
        headers = {name: request.headers[name] for name in ("accept", "content-type") if name in request.headers}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        url, body = f"{base.rstrip('/')}{route.removeprefix('/v1')}", await request.body()
        self._gateway.count_unrecorded(attempt, route.removeprefix("/v1/"))
        if self._client is None:
            # A proxy of the environment is for servers elsewhere; the model server is asked directly everywhere.
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


def find_route(path: str) -> ModelRoute | None:
    """What a path, decoded, says; None if it is of no model API, alone or after an attempt's.

    >>> find_route("//openai/deployments/m/chat/completions/")
    ModelRoute(path='/v1/chat/completions', route='/v1/chat/completions', parameters={'deployment': 'm'})
    >>> find_route("/agl/v1/lease") is None
    True
    """
    match = _PATH.fullmatch(re.sub("//+", "/", path) if "//" in path else path)
    if match is None:
        return None
    route = f"/v1{match['route']}"
    if not match["base"] and route not in _BARE and not route.startswith((f"{_MODELS}/", _RESPONSES)):
        return None
    named = {name: match[name] for name in ("rollout", "attempt", "deployment") if match[name] is not None}
    return ModelRoute(f"{match['prefix'] or ''}{route}", route, named)


def models_routes(prefix: str, gateway: Gateway) -> Sequence[Route]:
    """The list of models that a request may name, and each."""
    started = int(time.time())

    async def listed(request: Request) -> Response:
        name = request.path_params.get("model")
        try:
            names = gateway.models(await gateway.attribution.of(request))
            if name is not None and name not in names:
                raise ApiError(404, f"There is no model {name!r} here.", code="model_not_found")
        except ApiError as error:
            return openai_error(error)
        entries = [
            {"id": model, "object": "model", "created": started, "owned_by": "agl"}
            for model in (names if name is None else [name])
        ]
        content = {"object": "list", "data": entries} if name is None else entries[0]
        return Response(orjson.dumps(content), media_type="application/json")

    paths = (f"{prefix}{_MODELS}", f"{prefix}{_MODELS}/{{model:path}}")
    return [Route(path, listed, methods=["GET"]) for path in paths]


async def unserved(request: Request, error: Exception) -> Response:
    """The answer to a path that leads nowhere, in the API that it resembles."""
    path, status = request.url.path, error.status_code if isinstance(error, HTTPException) else 404
    if (target := find_route(path)) and target.route in DIALECTS:  # With POST it would have been a model call.
        status = 405
    message = (
        f"agl does not serve {request.method} {path}. There are POST {', '.join([*DIALECTS, *sorted(PASSED_ON)])} and "
        "/v1/traces, and GET /v1/models, also below an attempt's path; /openapi.json has the others. "
        "Does the base URL end in /v1, as OpenAI's clients want it, or without it, as Anthropic's does?"
    )
    refused = ApiError(status, message, code="unknown_route")
    resembled = next((dialect for route, dialect in DIALECTS.items() if route in path), None)
    return openai_error(refused) if resembled is None else resembled.refuse(refused)
