"""Access to the pages: a browser needs the token of the printed address, one on another machine the operator's key."""

from __future__ import annotations

import base64
import secrets
from urllib.parse import quote, urlencode

from starlette.datastructures import URL, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_server.http.keys import carries, equal_secrets, is_loopback

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Lets GET requests of browsers that have shown the token through to `app`.

    The first request has the token in its address (`?token=…`). The reply sets a cookie and redirects to the address
    without the token, so that neither history nor a shared link has it. Loopback needs it too: processes of agents run
    on this machine, and must not read expected answers.

    The Host header must name this machine, against DNS rebinding. With an operator's key it may be any: a page
    elsewhere has neither the key nor the cookie.
    """

    def __init__(self, app: ASGIApp, token: str, operator_key: str | None = None, once: str = "") -> None:
        self._app, self._token, self._operator_key = app, token, operator_key
        self._once = once
        """A token for one request: it stands on a browser's command line, which all can see."""
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
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._app if refusal is None else refusal)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        host = URL(f"http://{request.headers.get('host', '')}").hostname
        if self._operator_key is None and not is_loopback(host or ""):
            return PlainTextResponse("This server answers only to 127.0.0.1 and localhost.", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("These pages can only be read.", 405, {"Allow": "GET, HEAD"})
        if equal_secrets(request.cookies.get(self._cookie, ""), self._session):
            given = request.query_params.get("token")
            return None if given is None else self._without_token(request)
        if not _is_here(request):
            key = self._operator_key
            if key is not None and (carries(request, key) or equal_secrets(_password(request), key)):
                return None
            return PlainTextResponse(
                "From another machine these pages need the operator's key as the password; the name does not matter.",
                401,
                {"WWW-Authenticate": 'Basic realm="agl", charset="UTF-8"'},
            )
        token = request.query_params.get("token", "")
        if self._once and equal_secrets(token, self._once):
            self._once = ""
        elif not equal_secrets(token, self._token):
            return PlainTextResponse(
                "Open the address that agl view printed (or agl train, or agl serve): it ends in ?token=… The token "
                "changes with each start.",
                401,
            )
        response = self._without_token(request)
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return response

    def _without_token(self, request: Request) -> Response:
        others = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        path = "/" + quote(str(request.scope["path"]).lstrip("/"))
        return RedirectResponse(path + (f"?{urlencode(others)}" if others else ""), 303)


def _is_here(request: Request) -> bool:
    """True if the browser runs on this machine."""
    own, client = request.scope.get("server"), request.client
    return client is None or is_loopback(client.host) or (own is not None and client.host == own[0])


def _password(request: Request) -> str:
    """The password of HTTP basic authentication."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    try:
        return base64.b64decode(sent).decode().partition(":")[2] if scheme.lower() == "basic" else ""
    except ValueError:
        return ""
