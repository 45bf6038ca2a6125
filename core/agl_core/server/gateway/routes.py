"""The routes of model calls, found without a router because they are nearly all that a server is asked; and what
clients of model APIs get at other paths."""

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
from agl_core.server.dialects.dialect import Dialect
from agl_core.server.dialects.routes import DIALECTS
from agl_core.server.errors import ApiError
from agl_core.server.gateway.passthrough import Passthrough, is_passed_on
from agl_core.server.http.request import CallRequest
from agl_core.wire.headers import HEADER_IGNORED

logger = logging.getLogger(__name__)

_NOTES = 100
"""Different notes that are logged."""
_PATH = re.compile(r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?(?P<route>/v1/.+)")


class Place(NamedTuple):
    """Where a request goes that may be a model call."""

    route: str
    """Begins with /v1/."""
    parameters: Mapping[str, str]
    """`rollout` and `attempt`, if the path names them."""


class Answering(Protocol):
    """What answers model calls."""

    async def answer(self, request: Request, dialect: Dialect) -> Response: ...


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
            response = await self._passthrough.answer(request, place.route)
        else:
            await self._app(scope, receive, send)
            return
        await response(scope, receive, send)

    def _note(self, route: str, ignored: str | None) -> None:
        """Log once what requests ask for and do not get."""
        if ignored is not None and (note := f"{route}: {ignored}") not in self._noted and len(self._noted) < _NOTES:
            self._noted.add(note)
            logger.warning("Ignored in requests to %s, since it only tunes a hosted service.", note)


def find_place(path: str) -> Place | None:
    """What a path, decoded, says; None if it is not below /v1, alone or after an attempt's."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    attempt = {} if found["rollout"] is None else {"rollout": found["rollout"], "attempt": found["attempt"]}
    return Place(found["route"], attempt)


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
