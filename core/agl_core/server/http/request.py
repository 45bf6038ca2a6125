"""Starlette's request, where every millisecond counts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request


class _FoundHeaders(Headers):
    """Headers by name. Starlette's go through all of them for each name, and a call asks for many that are absent."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}

    def get(self, key: str, default: Any = None) -> Any:
        return self._first.get(key.lower(), default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._first


class CallRequest(Request):
    """The request of a model call: it asks for many headers, and reads the whole body once."""

    @cached_property
    def headers(self) -> Headers:
        return _FoundHeaders(self.scope["headers"])

    async def body(self) -> bytes:
        parts, more = list[bytes](), True
        while more:
            message = await self.receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        return b"".join(parts)
