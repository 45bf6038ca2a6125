"""The routes of model calls, found without a router: they are nearly all that a server is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.server.dialects.dialect import Dialect
from agl_core.server.gateway.passthrough import Passthrough, is_passed_on

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

    def __init__(
        self,
        app: ASGIApp,
        gateway: Answering,
        dialects: Mapping[str, Dialect],
        passthrough: Passthrough | None = None,
    ) -> None:
        self._app, self._gateway, self._dialects, self._passthrough = app, gateway, dialects, passthrough

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, method = find_place(scope["path"]), scope["method"]
        dialect = self._dialects.get(place.route) if place is not None and method == "POST" else None
        request = Request(scope, receive)
        if place is not None and dialect is not None:
            scope["path_params"] = place.parameters
            response = await self._gateway.answer(request, dialect)
        elif place is not None and self._passthrough is not None and is_passed_on(method, place.route):
            scope["path_params"] = place.parameters
            response = await self._passthrough.answer(request, place.route)
        else:
            await self._app(scope, receive, send)
            return
        await response(scope, receive, send)


def find_place(path: str) -> Place | None:
    """What a path, decoded, says; None if it is not below /v1, alone or after an attempt's."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    attempt = {} if found["rollout"] is None else {"rollout": found["rollout"], "attempt": found["attempt"]}
    return Place(found["route"], attempt)
