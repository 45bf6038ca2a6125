"""The routes of model calls, found without a router because they are nearly all that a server is asked; and what
clients of model APIs get at other paths.

Clients put together what they are given in many ways: with and without /v1, with slashes too many, and as Azure has it.
`find_place` makes one path of them all.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.server.dialects.chat import openai_error
from agl_core.server.dialects.dialect import Dialect, rendered
from agl_core.server.dialects.replies import NOT_KEPT, ReplyMemory
from agl_core.server.dialects.routes import DIALECTS
from agl_core.server.errors import ApiError, as_answer
from agl_core.server.gateway.passthrough import PASSED_ON, Passthrough, is_passed_on
from agl_core.server.http.request import CallRequest
from agl_core.wire.headers import HEADER_IGNORED

logger = logging.getLogger(__name__)

_NOTES = 100
"""Different notes that are logged."""
_PATH = re.compile(
    r"(?P<prefix>/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?"
    r"(?P<base>(?:/v1|/openai)*(?:/deployments/(?P<deployment>[^/]+))?)(?P<route>/.*[^/])/*"
)
_RESPONSES = "/v1/responses/"
_BARE = frozenset({*DIALECTS, *PASSED_ON, "/v1/models", "/v1/traces"})
"""Routes that are also served without /v1."""


class Place(NamedTuple):
    """Where a request goes that may be a model call."""

    path: str
    """As the routes have it."""
    route: str
    """Begins with /v1/."""
    parameters: Mapping[str, str]
    """`rollout`, `attempt` and `deployment`, if the path names them."""


class Answering(Protocol):
    """What answers model calls."""

    async def answer(self, request: Request, dialect: Dialect) -> Response: ...

    async def memory(self, request: Request) -> ReplyMemory:
        """The replies that a request may ask for; ApiError if it may not."""


class ModelCalls:
    """Answers POST requests to the dialects' routes, alone or below an attempt's path.

    `passthrough` answers what is passed on, if anything is, and `app` the rest.
    """

    def __init__(self, app: ASGIApp, gateway: Answering, passthrough: Passthrough | None = None) -> None:
        self._app, self._gateway, self._passthrough = app, gateway, passthrough
        self._noted: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, method = find_place(scope["path"]), scope["method"]
        dialect = DIALECTS.get(place.route) if place is not None and method == "POST" else None
        request = CallRequest(scope, receive)
        if place is not None and dialect is not None:
            scope["path_params"] = place.parameters
            response = await self._gateway.answer(request, dialect)
            self._note(place.route, response.headers.get(HEADER_IGNORED))
        elif place is not None and self._passthrough is not None and is_passed_on(method, place.route):
            scope["path_params"] = place.parameters
            scope["raw_path"] = (find_place(scope["raw_path"].decode("latin-1")) or place).path.encode("latin-1")
            response = await self._passthrough.answer(request, place.route)
        elif place is not None and place.route.startswith(_RESPONSES) and method in ("GET", "DELETE"):
            scope["path_params"] = place.parameters
            response = await self._kept(request, place.route.removeprefix(_RESPONSES))
        else:
            await self._app(scope if place is None else {**scope, "path": place.path}, receive, send)
            return
        await response(scope, receive, send)

    async def _kept(self, request: Request, id: str) -> Response:
        """Answer a request for a response that was given before, or for its removal."""
        try:
            memory = await self._gateway.memory(request)
            found = memory.response(id)
            if found is None:
                raise ApiError(404, f"There is no response {id!r}. {NOT_KEPT}", code="response_not_found")
            if request.method == "DELETE":
                memory.drop(id)
                found = {"id": id, "object": "response", "deleted": True}
            return rendered(found)
        except Exception as error:
            return openai_error(as_answer(error, request.url.path))

    def _note(self, route: str, ignored: str | None) -> None:
        """Log once what requests ask for and do not get."""
        if ignored is not None and (note := f"{route}: {ignored}") not in self._noted and len(self._noted) < _NOTES:
            self._noted.add(note)
            logger.warning("Ignored in requests to %s.", note)


def find_place(path: str) -> Place | None:
    """What a path, decoded, says; None if it is of no model API, alone or after an attempt's.

    >>> find_place("//openai/deployments/m/chat/completions/")
    Place(path='/v1/chat/completions', route='/v1/chat/completions', parameters={'deployment': 'm'})
    >>> find_place("/agl/v1/lease") is None
    True
    """
    found = _PATH.fullmatch(re.sub("//+", "/", path) if "//" in path else path)
    if found is None:
        return None
    route = f"/v1{found['route']}"
    if not found["base"] and route not in _BARE and not route.startswith(("/v1/models/", _RESPONSES)):
        return None
    named = {name: found[name] for name in ("rollout", "attempt", "deployment") if found[name] is not None}
    return Place(f"{found['prefix'] or ''}{route}", route, named)


def models_route(path: str, models: Callable[[Request], Awaitable[Mapping[str, Mapping[str, str]]]]) -> Route:
    """The list of models that a request may name; `models` finds each one's fields beside OpenAI's."""
    started = int(time.time())

    async def listed(request: Request) -> Response:
        try:
            found = await models(request)
        except ApiError as error:
            return openai_error(error)
        entries = [
            {"id": name, "object": "model", "created": started, "owned_by": "agl", **more}
            for name, more in found.items()
        ]
        return Response(orjson.dumps({"object": "list", "data": entries}), media_type="application/json")

    return Route(path, listed, methods=["GET"])


def unserved(request: Request, error: Exception, who: str, others: str) -> Response:
    """The answer to a path that leads nowhere, in the API that it resembles; `others` are served beside model calls."""
    path, status = request.url.path, error.status_code if isinstance(error, HTTPException) else 404
    if (place := find_place(path)) and place.route in DIALECTS:  # With POST it would have been a model call.
        status = 405
    message = (
        f"{who} does not serve {request.method} {path}. There are POST {', '.join(DIALECTS)}{others}. Does the base "
        "URL end in /v1, as OpenAI's clients want it, or without it, as Anthropic's does?"
    )
    refused = ApiError(status, message, code="unknown_route")
    resembled = next((dialect for route, dialect in DIALECTS.items() if route in path), None)
    return openai_error(refused) if resembled is None else resembled.refuse(refused)
