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
    """Where a model call goes."""

    dialect: Dialect
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
        place = find_place(scope["path"], self._dialects) if scope["method"] == "POST" else None
        if place is not None:
            scope["path_params"] = place.parameters
            response = await self._gateway.answer(Request(scope, receive), place.dialect)
        elif self._passthrough is not None and (passed := find_passed(scope["method"], scope["path"])):
            scope["path_params"] = passed.parameters
            response = await self._passthrough.answer(Request(scope, receive), passed.route)
        else:
            await self._app(scope, receive, send)
            return
        await response(scope, receive, send)


class PassedPlace(NamedTuple):
    """Where a request goes that is passed on."""

    route: str
    parameters: Mapping[str, str]


def find_passed(method: str, path: str) -> PassedPlace | None:
    """The same for requests that are passed on: None if it is not one of them."""
    found = _PATH.fullmatch(path)
    if found is None or not is_passed_on(method, found["route"]):
        return None
    return PassedPlace(found["route"], _attempt_in(found))


def _attempt_in(found: re.Match[str]) -> dict[str, str]:
    return {} if found["rollout"] is None else {"rollout": found["rollout"], "attempt": found["attempt"]}


def find_place(path: str, dialects: Mapping[str, Dialect]) -> Place | None:
    """What a path, decoded, says; `dialects` by their routes. None if it is not one of model calls."""
    found = _PATH.fullmatch(path)
    dialect = None if found is None else dialects.get(found["route"])
    if found is None or dialect is None:
        return None
    return Place(dialect, _attempt_in(found))
