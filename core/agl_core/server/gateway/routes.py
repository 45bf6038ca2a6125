"""The routes of model calls, found without a router: they are nearly all that a server is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.server.dialects.dialect import Dialect

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
    """Answers POST requests to the dialects' routes, alone or below an attempt's path; `app` answers the others."""

    def __init__(self, app: ASGIApp, gateway: Answering, dialects: Mapping[str, Dialect]) -> None:
        self._app, self._gateway, self._dialects = app, gateway, dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = find_place(scope["path"], self._dialects) if scope["method"] == "POST" else None
        if place is None:
            await self._app(scope, receive, send)
            return
        scope["path_params"] = place.parameters
        response = await self._gateway.answer(Request(scope, receive), place.dialect)
        await response(scope, receive, send)


def find_place(path: str, dialects: Mapping[str, Dialect]) -> Place | None:
    """What a path, decoded, says; `dialects` by their routes. None if it is not one of model calls."""
    found = _PATH.fullmatch(path)
    dialect = None if found is None else dialects.get(found["route"])
    if found is None or dialect is None:
        return None
    named = found["rollout"] is not None
    return Place(dialect, {"rollout": found["rollout"], "attempt": found["attempt"]} if named else {})
