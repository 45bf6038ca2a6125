"""Replies of one policy version from their first token to their last, whatever veRL does with the weights meanwhile.

While weights are exchanged no request is let through, and a reply that was begun before is thrown away and sampled
anew afterwards. Its caller notices nothing but the time. A header names the version; agl's gateway records it.

Pure ASGI: nothing here knows vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from agl_core.wire.headers import HEADER_POLICY

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """Shut until the first weights are there."""

    def __init__(self) -> None:
        self.version = 0
        """Of the weights behind it."""
        self._closings = 0
        self._open = asyncio.Event()

    def close(self) -> None:
        """What is under way is disturbed; nothing enters."""
        self._closings += 1
        self._open.clear()

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    async def enter(self) -> Passage:
        """Wait until it is open."""
        await self._open.wait()
        return Passage(self.version, self._closings)

    def disturbed(self, passage: Passage) -> bool:
        """Whether it was shut since."""
        return passage.closings != self._closings


@dataclass(frozen=True, slots=True)
class Passage:
    """One request's way through the gate."""

    version: int
    closings: int


@dataclass(slots=True)
class _Reply:
    """A reply that is held back until it is known to be of one version."""

    messages: list[Message] = field(default_factory=list)

    async def add(self, message: Message) -> None:
        self.messages.append(message)


class GatedApp:
    """An ASGI app behind a gate: its model calls (POST below /v1) pass it, everything else goes by."""

    def __init__(self, app: App, gate_of: Callable[[Scope], Gate]) -> None:
        self._app, self._gate_of = app, gate_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        gate, body = self._gate_of(scope), await _whole_body(receive)
        while True:
            passage, reply = await gate.enter(), _Reply()
            await self._app(dict(scope), _again(body, receive), reply.add)
            if not gate.disturbed(passage):
                break
        for message in reply.messages:
            if message["type"] == "http.response.start":
                version = (HEADER_POLICY.encode(), str(passage.version).encode())
                message = {**message, "headers": [*message.get("headers", ()), version]}
            await send(message)


async def _whole_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        part: bytes = message.get("body", b"")
        body += part
        if not message.get("more_body", False):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """The request once more; afterwards whatever its client does, such as hanging up."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
