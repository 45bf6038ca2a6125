"""Limits of every request, checked before its content is."""

from __future__ import annotations

import zlib
from itertools import chain

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_core.server.dialects.chat import openai_error
from agl_core.server.errors import ApiError
from agl_core.wire.body import MAX_BODY
from agl_core.wire.online import OF_ONLINE
from agl_core.wire.workers import OF_WORKERS

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 << 10
"""Of names, values and the URL."""
MAX_HEAD_BYTES = 96 << 10
"""Of the same with all that stands between them: where a head has more, its connection is closed before it is whole."""
LARGEST_BODY = "agl.largest_body"
"""In a request's scope: how many bytes its body may have, and what to do about one that has more."""
_OWN_LIMIT = "/v1/traces"
_REMEDY = " The run's configuration sets the limit: [gateway] max_body_mib."
_LARGEST = {each.path: each.largest for each in (*OF_WORKERS, *OF_ONLINE)}
"""Bytes of a body, by its path."""


class RequestLimits:
    """Refuses requests with too many headers, and bodies that are too large where they are read.

    A body is refused by an ApiError out of `receive`, so that each route answers in its own shape; nothing is read
    of one that says beforehand how large it is. Exports of spans have a limit of their own. A client that hangs up
    before its body is whole is an ApiError, too. `of_agents` is the largest body of an agent, in bytes, if
    the configuration sets it.
    """

    def __init__(self, app: ASGIApp, of_agents: int | None = None) -> None:
        self._app, self._of_agents = app, of_agents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        url = len(scope["raw_path"]) + len(scope["query_string"])
        size = url + sum(map(len, chain.from_iterable(headers)))
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            await openai_error(head_too_large())(scope, receive, send)
            return
        path = scope["path"]
        is_agents = not path.startswith("/agl/")
        most: int | None = _LARGEST.get(path, self._of_agents if is_agents and self._of_agents else MAX_BODY)
        remedy = _REMEDY if is_agents and self._of_agents else ""
        most = None if path.endswith(_OWN_LIMIT) else most
        scope[LARGEST_BODY] = most, remedy
        await self._app(scope, _checked(headers, receive, most, remedy), send)


def decompressed(body: bytes, encoding: str, most: int, error: ApiError) -> bytes:
    """A body without its content encoding; ApiError 415 or 400, and `error` if it has more than `most` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise ApiError(415, f"Content-Encoding {encoding!r} is not known here: send gzip or none.")
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, most + 1)
    except zlib.error as wrong:
        raise ApiError(400, f"The body is not gzip, although its Content-Encoding says so ({wrong}).") from wrong
    if len(plain) > most:
        raise error
    if not inflater.eof:
        raise ApiError(400, "The gzip body is cut off.")
    return plain


def head_too_large() -> ApiError:
    """The answer to a request with too many headers, or too large ones."""
    return ApiError(
        431,
        f"The request has more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES >> 10} KiB of them, "
        f"the URL included.",
        code="headers_too_large",
    )


def _checked(headers: list[tuple[bytes, bytes]], receive: Receive, most: int | None, remedy: str) -> Receive:
    declared = dict(headers).get(b"content-length", b"")
    announced = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    arrived, is_whole = 0, False

    async def read() -> Message:
        nonlocal arrived, is_whole
        if most is not None and announced > most:
            raise body_too_large(most, remedy)
        message = await receive()
        if message["type"] == "http.disconnect" and not is_whole:
            raise ApiError(400, "The client hung up before its request was whole.", code="hung_up")
        is_whole |= not message.get("more_body", False)
        arrived += len(message.get("body", b""))
        if most is not None and arrived > most:
            raise body_too_large(most, remedy)
        return message

    return read


def body_too_large(most: int, remedy: str) -> ApiError:
    """The answer to a body of more than `most` bytes."""
    return ApiError(413, f"The request body is larger than {most >> 20} MiB.{remedy}", code="body_too_large")
