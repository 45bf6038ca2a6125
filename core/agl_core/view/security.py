"""Access to the pages: a browser on this machine needs the token of the printed address."""

from __future__ import annotations

import hmac
import secrets
from typing import Any
from urllib.parse import quote, urlencode

from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets a request through to `app` if its browser has shown the token, and only if it only reads.

    The first request has the token in its address (`?token=…`). It is answered with a cookie, and with the same address
    without the token, so that neither history nor a link that is passed on has it. On loopback too: what agents start
    runs on this machine, and must not read expected answers.

    The Host header must name this machine itself, so that no page elsewhere reads these ones under a name of its own
    that leads here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._cookie = f"agl-view-{secrets.token_hex(4)}"
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                set_already = {name.lower() for name, _ in message["headers"]}
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in added if each[0] not in set_already)]
            await send(message)

        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        if URL(f"http://{request.headers.get('host', '')}").hostname not in _LOOPBACK:
            return PlainTextResponse("This server answers only to 127.0.0.1 and localhost.", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("These pages can only be read.", 405, {"Allow": "GET, HEAD"})
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            others = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            path = "/" + quote(str(request.scope["path"]).lstrip("/"))
            response = RedirectResponse(path + (f"?{urlencode(others)}" if others else ""), 303)
            response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
            return response
        if not _same(request.cookies.get(self._cookie, ""), self._session):
            return PlainTextResponse(
                "Open the address that agl view printed: it ends in ?token=… The token changes with each start.", 401
            )
        return None


def _same(one: Any, other: str) -> bool:
    return hmac.compare_digest(str(one).encode("utf-8", "replace"), other.encode())
