"""Where each HTTP library sends a request, so that what goes to the Lightning Server is stamped.

`requests` sends through urllib3, and `urllib.request` through `http.client`. A request that passes through several of
them is stamped by the first.

An agent that leaves a stream before its end did not get what the model said, so that must not count. The whole reply is
on its way at once, and often in the client's machine before the agent has read a word. Only the client's side can know
how much of it was handed to the agent, so events are handed on one by one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

from agl_core.capture.attach.methods import Patches
from agl_core.capture.attach.requests import Outgoing, Stamping, goes_to_the_server
from agl_core.capture.context import current_attempt
from agl_core.capture.recording import Recording
from agl_core.capture.reports import report_problem
from agl_core.wire.headers import HEADER_CALL, HEADER_ROLLOUT

_Send: TypeAlias = Callable[..., Any]
_STEP = "_agl_step"
_END = b"\n\n"
_LAST = 2
"""Events at a stream's end that carry no part of the reply: its usage, and its end."""


def stamp_library(library: ModuleType, stamping: Stamping, patches: Patches) -> None:
    """Patch an HTTP library; doing it again changes nothing."""
    _INSTALL[library.__name__](library, stamping, patches)


def _httpx(library: ModuleType, stamping: Stamping, patches: Patches) -> None:
    def stamping_send(send: _Send) -> _Send:
        def stamped_send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if not goes_to_the_server(str(request.url)):
                return send(client, request, *args, **kwargs)
            with stamping.stamped(_of_httpx(request)):
                response = send(client, request, *args, **kwargs)
            return _watched(library, response)

        return stamped_send

    def stamping_async_send(send: _Send) -> _Send:
        async def stamped_async_send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            if not goes_to_the_server(str(request.url)):
                return await send(client, request, *args, **kwargs)
            with stamping.stamped(_of_httpx(request)):
                response = await send(client, request, *args, **kwargs)
            return _watched(library, response)

        return stamped_async_send

    patches.replace(library.Client, "send", stamping_send)
    patches.replace(library.AsyncClient, "send", stamping_async_send)
    _poll_when_used(import_module(library.__name__.replace("httpx", "httpcore")), patches)


class _Handed:
    """How much of a stream was handed to the agent."""

    def __init__(self, call: str, size: int, recording: Recording) -> None:
        self._call, self._missing, self._recording = call, size, recording
        self._is_over = False
        self._rest = b""

    def events(self, data: bytes) -> Iterator[bytes]:
        """The events in what has come, one by one."""
        self._missing -= len(data)
        self._rest += data
        while self._rest:
            event, found, rest = self._rest.partition(_END)
            if not found and self._missing > 0:
                return
            self._rest = rest
            yield event + found

    def close(self) -> None:
        """The agent reads no more."""
        if not self._is_over:
            self._is_over = True
            if self._missing > 0 or self._rest.count(_END) > _LAST:
                self._recording.undelivered(self._call)


def _watched(library: ModuleType, response: Any) -> Any:
    """The response; if its agent closes it before it has read the reply, that is reported."""
    try:
        active, call = current_attempt(), response.headers.get(HEADER_CALL)
        size = response.headers.get("content-length", "")
        if active is not None and call and size.isdigit() and not response.is_closed:
            handed = _Handed(call, int(size), active.recording)
            response.stream = _watched_stream(library)(response.stream, handed)
    except Exception as error:
        report_problem("Watching a stream", error)
    return response


@functools.cache
def _watched_stream(library: ModuleType) -> Any:
    class WatchedStream(library.SyncByteStream, library.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, stream: Any, handed: _Handed) -> None:
            self._stream, self._handed = stream, handed

        def __iter__(self) -> Iterator[bytes]:
            for data in self._stream:
                yield from self._handed.events(data)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for data in self._stream:
                for event in self._handed.events(data):
                    yield event

        def close(self) -> None:
            self._handed.close()
            self._stream.close()

        async def aclose(self) -> None:
            self._handed.close()
            await self._stream.aclose()

    return WatchedStream


def _poll_when_used(pools: ModuleType, patches: Patches) -> None:
    """Have a pool ask the system about the one connection that it is about to use, and not about every idle one.

    A server may have closed an idle connection. A pool polls all of them at the start and at the end of each request,
    which took 44% of a worker's thread. A connection that turns out to be closed is left as one that another request
    has taken: the pool chooses again.
    """

    def too_old(_: _Send) -> _Send:
        def is_too_old(connection: Any) -> bool:
            expires = getattr(connection, "_expire_at", None)
            return expires is not None and time.monotonic() > expires

        return is_too_old

    def usable(has_expired: _Send) -> Callable[[_Send], _Send]:
        def checking(handle: _Send) -> _Send:
            def handle_if_usable(connection: Any, request: Any) -> Any:
                if has_expired(connection):
                    connection.close()
                    raise pools.ConnectionNotAvailable
                return handle(connection, request)

            return handle_if_usable

        return checking

    def async_usable(has_expired: _Send) -> Callable[[_Send], _Send]:
        def checking(handle: _Send) -> _Send:
            async def handle_if_usable(connection: Any, request: Any) -> Any:
                if has_expired(connection):
                    await connection.aclose()
                    raise pools.ConnectionNotAvailable
                return await handle(connection, request)

            return handle_if_usable

        return checking

    blocking, non_blocking = pools.HTTP11Connection, pools.AsyncHTTP11Connection
    patches.replace(blocking, "handle_request", usable(blocking.has_expired))
    patches.replace(non_blocking, "handle_async_request", async_usable(non_blocking.has_expired))
    for connection in (blocking, non_blocking):
        patches.replace(connection, "has_expired", too_old)


def _of_httpx(request: Any) -> Outgoing:
    def body() -> bytes | None:
        try:
            return bytes(request.content)
        except RuntimeError:  # It is a stream, which can be read only once.
            return None

    return Outgoing(request.method, request.headers, body)


def _urllib3(library: ModuleType, stamping: Stamping, patches: Patches) -> None:
    def stamping_urlopen(urlopen: _Send) -> _Send:
        def stamped_urlopen(
            pool: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            given = pool.headers if headers is None else headers
            found = _ours(_absolute(url, pool.scheme, pool.host, pool.port), given)
            if found is None:
                return urlopen(pool, method, url, body, headers, *args, **kwargs)
            with stamping.stamped(Outgoing(method, found)):
                return urlopen(pool, method, url, body, found, *args, **kwargs)

        return stamped_urlopen

    patches.replace(library.HTTPConnectionPool, "urlopen", stamping_urlopen)


def _aiohttp(library: ModuleType, stamping: Stamping, patches: Patches) -> None:
    def stamping_request(request: _Send) -> _Send:
        async def stamped_request(session: Any, method: str, url: Any, **options: Any) -> Any:
            given = [*session.headers.items(), *_pairs(options.get("headers"))]
            found = _ours(_aiohttp_url(session, url), given)
            if found is None:
                return await request(session, method, url, **options)
            with stamping.stamped(Outgoing(method, found)):
                return await request(session, method, url, **{**options, "headers": found})

        return stamped_request

    patches.replace(library.ClientSession, "_request", stamping_request)


def _aiohttp_url(session: Any, url: Any) -> str:
    base = getattr(session, "_base_url", None)
    text = str(url)
    return text if base is None or "://" in text else str(base.join(type(base)(text)))


def _http_client(library: ModuleType, stamping: Stamping, patches: Patches) -> None:
    """The call lasts until `getresponse` has the head of the reply."""

    def stamping_request(request: _Send) -> _Send:
        def stamped_request(
            connection: Any, method: str, url: str, body: Any = None, headers: Any = (), **options: Any
        ) -> Any:
            scheme = "https" if isinstance(connection, library.HTTPSConnection) else "http"
            found = _ours(_absolute(url, scheme, connection.host, connection.port), headers)
            if found is None:
                return request(connection, method, url, body, dict(headers), **options)
            step = stamping.stamp(Outgoing(method, found))
            setattr(connection, _STEP, step)
            try:
                return request(connection, method, url, body, found, **options)
            except BaseException:
                _end(connection)
                raise

        return stamped_request

    def ending(getresponse: _Send) -> _Send:
        def ended_by_response(connection: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return getresponse(connection, *args, **kwargs)
            finally:
                _end(connection)

        return ended_by_response

    patches.replace(library.HTTPConnection, "request", stamping_request)
    patches.replace(library.HTTPConnection, "getresponse", ending)


def _end(connection: Any) -> None:
    step = connection.__dict__.pop(_STEP, None)
    if step is not None:
        step.end_call()


def _absolute(url: str, scheme: str, host: str, port: int | None) -> str:
    """The whole URL of a request; a proxy is sent whole ones."""
    if not url.startswith("/"):
        return url
    name = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{name}{'' if port is None else f':{port}'}{url}"


def _ours(url: str, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> dict[str, str] | None:
    """The headers of a request to the server, by names in lower case; None if it is none, or is stamped already."""
    try:
        if not goes_to_the_server(url):
            return None
        found = {_text(name).lower(): _text(value) for name, value in _pairs(headers)}
    except Exception as error:
        report_problem("Reading a request", error)
        return None
    return None if HEADER_ROLLOUT in found else found


def _pairs(headers: Any) -> Iterable[tuple[Any, Any]]:
    return headers.items() if hasattr(headers, "items") else headers or ()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


_INSTALL: Mapping[str, Callable[[ModuleType, Stamping, Patches], None]] = {
    "httpx": _httpx,  # openai 1.x, 2.x and anthropic use it, openai 3.x the next one
    "httpx2": _httpx,
    "urllib3.connectionpool": _urllib3,
    "aiohttp.client": _aiohttp,
    "http.client": _http_client,
}
HTTP_LIBRARIES = tuple(_INSTALL)
"""The modules that send requests."""
