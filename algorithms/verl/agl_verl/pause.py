"""Replies of one policy version from their first token to their last, whatever veRL does with the weights meanwhile.

While weights are exchanged no request is let through. A response that was begun before is thrown away and sampled anew
afterwards: its caller notices nothing but the time. A stream that has begun cannot be taken back. The exchange waits
for its end, but not for long; one that takes longer ends with an error.

Nothing here imports vLLM.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from agl_chat.backends import Backend, Generation, Request, SampledToken
from agl_core.errors import EngineError

OPEN = frozenset({"/health", "/metrics"})
"""A model server's routes that everyone may read: they say nothing of prompts and replies."""
SECONDS_TO_END = 30.0
"""For streams that have begun when weights are to be exchanged: one that is cut off often costs the attempt."""


class Gate:
    """Shut until the first weights are there."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        """By policy, of the weights behind it; the only policy may have no name."""
        self.closings = 0
        """How often what was under way was disturbed."""
        self.streams = set[asyncio.Future[None]]()
        """The ends of replies of which clients have a part."""
        self.counters = Counter(tokens_prefilled=0, tokens_reused=0, tokens_decoded=0)
        """Tokens of whole replies, also of the ones that were thrown away."""
        self.opened = asyncio.Event()

    async def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Let nothing in. When the streams have ended, or after so many seconds, what is under way is disturbed."""
        self.opened.clear()
        if self.streams:
            await asyncio.wait(self.streams, timeout=seconds)
        self.closings += 1

    def open(self) -> None:
        self.opened.set()

    async def enter(self, policy: str) -> tuple[int, int]:
        """Wait until it is open. The policy's version, and how often what was under way was disturbed."""
        while not self.opened.is_set():
            await self.opened.wait()
        return self.versions.get(policy, self.versions.get("", 0)), self.closings


class GatedBackend:
    """A back end behind a gate."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self._backend, self._gate = backend, gate

    async def generate(self, request: Request) -> Generation:
        """See `Backend`. EngineError if weights were exchanged before the end of what was watched in part."""
        while (generated := await self._try(request)) is None:
            pass
        return generated

    async def _try(self, request: Request) -> Generation | None:
        """Responses of one version; None if weights were exchanged meanwhile."""
        gate, watcher = self._gate, request.watch
        version, closings = await gate.enter(request.model)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def watch(token: SampledToken) -> None:
            # What would begin while the gate closes is not watched: it can still be sampled anew.
            if watcher and (ended in gate.streams or (gate.opened.is_set() and gate.closings == closings)):
                gate.streams.add(ended)
                watcher(token)

        try:
            generated = await self._backend.generate(replace(request, watch=watcher and watch))
            decoded = sum(len(response.tokens) for response in generated.responses)
            gate.counters.update(
                tokens_prefilled=generated.prefilled, tokens_reused=generated.reused, tokens_decoded=decoded
            )
        except EngineError:
            if gate.closings == closings or ended in gate.streams:
                raise
            return None
        finally:
            has_begun = ended in gate.streams
            ended.set_result(None)
            gate.streams.discard(ended)
        if gate.closings != closings and has_begun:
            raise EngineError("The weights changed before the end of this reply. Ask again.")
        return replace(generated, version=version) if gate.closings == closings else None


class FrontApp(ABC):
    """An ASGI app before a model server's own, of which `OPEN` alone is reached: others may ask for no key, or sample
    past the gate. The chat layer answers all else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._chat: ASGIApp | None = None

    @abstractmethod
    def make_chat(self, app: Any) -> ASGIApp:
        """The chat layer, which takes the key; `app` is the server's own, after its start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN
        if is_open or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        self._chat = self._chat or self.make_chat(scope["app"])
        await self._chat({**scope}, receive, send)
