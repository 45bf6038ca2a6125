"""Starlette's request, where microseconds count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope

from agl_core.server.http.limits import LARGEST_BODY, body_too_large, decompressed


class CallRequest(Request):
    """The request of a model call: it is asked for a dozen headers, most of them absent, and its body is read once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._headers = _FoundHeaders(scope["headers"])

    async def body(self) -> bytes:
        parts, more = list[bytes](), True
        while more:
            message = await self.receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body, encoding = b"".join(parts), self.headers.get("content-encoding", "").strip().lower()
        if not encoding:
            return body
        most, remedy = self.scope[LARGEST_BODY]
        return decompressed(body, encoding, most, body_too_large(most, remedy))


class _FoundHeaders(Headers):
    """Starlette's go through all of them for each name that is looked up."""

    def __init__(self, raw: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=list(raw))
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}

    def get(self, key: str, default: Any = None) -> Any:
        return self._first.get(key.lower(), default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._first
