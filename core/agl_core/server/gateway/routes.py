"""The routes of model calls, found without a router because they are nearly all that a server is asked; and what
clients of model APIs get at other paths.

Clients put together what they are given in many ways: with and without /v1, with slashes too many, and as Azure has it.
`find_route` makes one path of them all.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import orjson
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.server.dialects.chat import ChatCompletions, Completions
from agl_core.server.dialects.dialect import Dialect, rendered
from agl_core.server.dialects.messages import Messages
from agl_core.server.dialects.responses import Responses
from agl_core.server.errors import ApiError, as_answer, openai_error
from agl_core.server.gateway.answered import NOT_KEPT, Answered
from agl_core.server.gateway.passthrough import PASSED_ON, Passthrough, is_passed_on
from agl_core.server.listening import LARGEST_BODY, body_too_large, decompressed
from agl_core.wire.headers import HEADER_IGNORED

logger = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/responses/input_tokens": Responses(counts=True),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": Messages(counts=True),
    "/v1/completions": Completions(),
}
_MAX_NOTES = 100
"""Different notes that are logged."""
_PATH = re.compile(
    r"(?P<prefix>/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?"
    r"(?P<base>(?:/v1|/openai)*(?:/deployments/(?P<deployment>[^/]+))?)(?P<route>/.*[^/])/*"
)
_RESPONSES = "/v1/responses/"
_BARE = frozenset({*DIALECTS, *PASSED_ON, "/v1/models", "/v1/traces"})
"""Routes that are also served without /v1."""


class ModelRoute(NamedTuple):
    """Where a request goes that may be a model call."""

    path: str
    """As the routes have it."""
    route: str
    """Begins with /v1/."""
    parameters: Mapping[str, str]
    """`rollout`, `attempt` and `deployment`, if the path names them."""


class ModelCallHandler(Protocol):
    """Answers model calls."""

    async def answer(self, request: Request, dialect: Dialect) -> Response: ...

    async def answered(self, request: Request) -> Answered:
        """The replies that a request may ask for; ApiError if it may not."""


class ModelCalls:
    """Answers POST requests to the dialects' routes, alone or below an attempt's path.

    `passthrough` answers what is passed on, if anything is, and `app` the rest.
    """

    def __init__(self, app: ASGIApp, handler: ModelCallHandler, passthrough: Passthrough | None = None) -> None:
        self._app, self._handler, self._passthrough = app, handler, passthrough
        self._noted: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target, method = find_route(scope["path"]), scope["method"]
        if target is None:
            await self._app(scope, receive, send)
            return
        request = CallRequest({**scope, "path_params": target.parameters}, receive)
        dialect = DIALECTS.get(target.route) if method == "POST" else None
        if dialect is not None:
            response = await self._handler.answer(request, dialect)
            self._note(target.route, response.headers.get(HEADER_IGNORED))
        elif self._passthrough is not None and is_passed_on(method, target.route):
            raw = find_route(scope["raw_path"].decode("latin-1")) or target
            request.scope["raw_path"] = raw.path.encode("latin-1")
            response = await self._passthrough.answer(request, target.route)
        elif target.route.startswith(_RESPONSES) and method in ("GET", "DELETE"):
            response = await self._kept(request, target.route.removeprefix(_RESPONSES))
        else:
            await self._app({**scope, "path": target.path}, receive, send)
            return
        await response(scope, receive, send)

    async def _kept(self, request: Request, id: str) -> Response:
        """Answer a request for a response that was given before, or for its removal."""
        try:
            answered = await self._handler.answered(request)
            response = answered.response(id)
            if response is None:
                raise ApiError(404, f"There is no response {id!r}. {NOT_KEPT}", code="response_not_found")
            if request.method == "DELETE":
                answered.drop(id)
                response = {"id": id, "object": "response", "deleted": True}
            return rendered(response)
        except Exception as error:
            return openai_error(as_answer(error, request.url.path))

    def _note(self, route: str, ignored: str | None) -> None:
        """Log once what requests ask for and do not get."""
        if ignored is not None and (note := f"{route}: {ignored}") not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted.add(note)
            logger.warning("Ignored in requests to %s.", note)


class CallRequest(Request):
    """The request of a model call: it is asked for a dozen headers, most of them absent, and its body is read once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._headers = _IndexedHeaders(scope["headers"])

    async def body(self) -> bytes:
        parts, more = list[bytes](), True
        while more:
            message = await self.receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body, encoding = b"".join(parts), self.headers.get("content-encoding", "").strip().lower()
        if not encoding:
            return body
        most = self.scope[LARGEST_BODY]
        return decompressed(body, encoding, most, body_too_large(most))


class _IndexedHeaders(Headers):
    """Starlette's go through all of them for each name that is looked up."""

    def __init__(self, raw: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=list(raw))
        self._first = dict(reversed(raw))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first


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
    if not match["base"] and route not in _BARE and not route.startswith(("/v1/models/", _RESPONSES)):
        return None
    named = {name: match[name] for name in ("rollout", "attempt", "deployment") if match[name] is not None}
    return ModelRoute(f"{match['prefix'] or ''}{route}", route, named)


def models_route(path: str, models: Callable[[Request], Awaitable[Mapping[str, Mapping[str, str]]]]) -> Route:
    """The list of models that a request may name; `models` finds each one's fields beside OpenAI's."""
    started = int(time.time())

    async def listed(request: Request) -> Response:
        try:
            names = await models(request)
        except ApiError as error:
            return openai_error(error)
        entries = [
            {"id": name, "object": "model", "created": started, "owned_by": "agl", **more}
            for name, more in names.items()
        ]
        return Response(orjson.dumps({"object": "list", "data": entries}), media_type="application/json")

    return Route(path, listed, methods=["GET"])


def unserved(request: Request, error: Exception, who: str, others: str) -> Response:
    """The answer to a path that leads nowhere, in the API that it resembles; `others` are served beside model calls."""
    path, status = request.url.path, error.status_code if isinstance(error, HTTPException) else 404
    if (target := find_route(path)) and target.route in DIALECTS:  # With POST it would have been a model call.
        status = 405
    message = (
        f"{who} does not serve {request.method} {path}. There are POST {', '.join(DIALECTS)}{others}. Does the base "
        "URL end in /v1, as OpenAI's clients want it, or without it, as Anthropic's does?"
    )
    refused = ApiError(status, message, code="unknown_route")
    resembled = next((dialect for route, dialect in DIALECTS.items() if route in path), None)
    return openai_error(refused) if resembled is None else resembled.refuse(refused)
