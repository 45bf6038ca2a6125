"""The application, listening for browsers: for `agl view`, and beside a run in a process of its own.

A browser needs the token of the printed address, one on another machine the operator's key.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import quote, urlencode

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import URL, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_core.errors import AglError, ConfigError, StoreRefusedError
from agl_server.http.keys import carries, equal_secrets, is_loopback
from agl_server.http.listening import bind, url_of
from agl_view.pages import BadQueryError, Pages, RunFolders
from agl_view.pages.compare import compare_page, task_page
from agl_view.pages.run import health_page, run_page
from agl_view.templating import page_address

_RESTART_SECONDS = 1.0
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


def make_app(paths: Sequence[Path], token: str, operator_key: str | None = None, once: str = "") -> Starlette:
    """The pages about the runs at `paths`, each a run or a folder of runs (access: `Guard`)."""
    pages = Pages(RunFolders(paths))

    async def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return pages.render(request, "error.html", status=error.status_code, said="There is no such page.")
        is_missing = isinstance(error, ConfigError | StoreRefusedError)
        status = 400 if isinstance(error, BadQueryError) else 404 if is_missing else 503
        return pages.render(request, "error.html", status=status, said=str(error))

    run_path = "/runs/{run}"
    return Starlette(
        routes=[
            Route("/", pages.runs),
            Route("/changed", pages.changed),
            Route("/compare", partial(compare_page, pages)),
            Route("/compare/task", partial(task_page, pages)),
            Route(run_path, partial(run_page, pages)),
            Route(f"{run_path}/changed", pages.changed),
            Route(f"{run_path}/health", partial(health_page, pages)),
            Route(f"{run_path}/rollouts", pages.rollouts),
            Route(f"{run_path}/rollouts/{{id:path}}", pages.rollout),
            Route(f"{run_path}/groups/{{id:path}}", pages.group),
            Route(f"{run_path}/call", pages.call),
            Mount("/static", StaticFiles(packages=[("agl_view", "static")])),
        ],
        middleware=[Middleware(Guard, token=token, operator_key=operator_key, once=once)],
        exception_handlers={AglError: failed, HTTPException: failed},
    )


def answer(
    listener: socket.socket,
    folders: Sequence[Path],
    token: str,
    operator_key: str | None = None,
    once: str = "",
) -> None:
    """Serve the pages until a signal ends it."""
    config = uvicorn.Config(
        make_app(folders, token, operator_key, once),
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=2,
        lifespan="off",
        proxy_headers=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


def address_of(listener: socket.socket, path: str, token: str) -> str:
    """The address of a page for a browser on this machine."""
    return f"{url_of(*listener.getsockname()[:2])}{path}?token={token}"


@asynccontextmanager
async def shown_beside(run: Path, host: str, port: int, operator_key: str | None) -> AsyncIterator[str]:
    """Show `run` and its folder's other runs while this process writes it; yields an address with a token in it.

    Another process answers, from the first visitor to the end of this one: reading must not hold up the gateway, and a
    process that opens the store's file a second time and closes it loses the writer's lock.
    """
    run = await asyncio.to_thread(run.resolve)
    listener = bind(host, port)
    token = secrets.token_urlsafe(24)
    settings = {"folder": str(run.parent), "token": token, "operator_key": operator_key}
    visited = asyncio.create_task(_answer_visitors(listener, settings))
    try:
        yield address_of(listener, page_address("runs", run.name), token)
    finally:
        visited.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await visited
        listener.close()


async def _answer_visitors(listener: socket.socket, settings: dict[str, str | None]) -> None:
    """Start the process on the first request, and again if it fails."""
    loop = asyncio.get_running_loop()
    while True:
        called = asyncio.Event()
        loop.add_reader(listener, called.set)
        try:
            await called.wait()
        finally:
            loop.remove_reader(listener)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "agl_view.serving",
            str(listener.fileno()),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the run, which then ends this process.
        )
        try:
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(settings) + b"\n")
            await process.wait()
            await asyncio.sleep(_RESTART_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def answer_beside(descriptor: int, orders: IO[bytes]) -> None:
    """The process of `shown_beside`: `orders` is a line of settings, and ends with the run's process."""
    settings = orjson.loads(orders.readline())
    with contextlib.suppress(OSError):
        os.nice(5)  # Training goes first.

    def until_the_end() -> None:
        orders.read()
        os._exit(0)

    threading.Thread(target=until_the_end, daemon=True).start()
    with socket.socket(fileno=descriptor) as listener:
        answer(listener, [Path(settings["folder"])], settings["token"], settings["operator_key"])


class Guard:
    """Lets GET requests of browsers that have shown the token through to `app`.

    The first request has the token in its address (`?token=…`). The reply sets a cookie and redirects to the address
    without the token, so that neither history nor a shared link has it. Loopback needs it too: agents run on this
    machine, and must not read expected answers. The Host header must name this machine, against DNS rebinding; with an
    operator's key it may be any.
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


if __name__ == "__main__":
    answer_beside(int(sys.argv[1]), sys.stdin.buffer)
