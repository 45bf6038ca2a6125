"""Replies of one policy version from their first token to their last, whatever veRL does with the weights meanwhile.

While weights are exchanged no request is let through, and a reply that was begun before is thrown away and sampled
anew afterwards. Its caller notices nothing but the time. A header names the version; agl's gateway records it.

Nothing here imports vLLM: the gate is pure ASGI, and servers' counters are read over HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Iterator

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError

OPEN = frozenset({"/health", "/metrics"})
"""Routes that everyone may read: they say nothing of prompts and replies."""
_REFUSED = 1008
"""A WebSocket's code for it: what goes over one could not be taken back, so none is opened."""


class Gate:
    """Shut until the first weights are there."""

    def __init__(self) -> None:
        self.version = 0
        """Of the weights behind it."""
        self.closings = 0
        """How often it was shut."""
        self._open = asyncio.Event()

    def close(self) -> None:
        """Let nothing in; whatever is under way is disturbed."""
        self.closings += 1
        self._open.clear()

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    async def enter(self) -> tuple[int, int]:
        """Wait until it is open. The version behind it, and how often it was shut."""
        await self._open.wait()
        return self.version, self.closings


class GatedApp:
    """An ASGI app behind a gate, for those who have the key.

    Whatever is posted passes the gate, whichever route samples: vLLM has several, some of which it leaves unguarded
    itself. Without the key only `OPEN` is answered.
    """

    def __init__(self, app: ASGIApp, gate_of: Callable[[Scope], Gate], key: str) -> None:
        if not key:
            raise ValueError("a gated app needs a key")
        self._app, self._gate_of = app, gate_of
        self._expected = f"bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": _REFUSED})
        elif not self._may_pass(scope):
            error = {
                "message": "This server answers its run alone: the key is missing or wrong.",
                "type": "invalid_key",
            }
            await JSONResponse({"error": error}, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["method"] in ("GET", "HEAD") and path in OPEN:
            return True
        scheme, _, token = Request(scope).headers.get("authorization", "").encode("latin-1").partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + token.strip(), self._expected)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate = self._gate_of(scope)
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        closings, messages = -1, list[Message]()
        while closings != gate.closings:  # Held back until it is known to be of one version.
            version, closings = await gate.enter()
            messages = []

            async def hold(message: Message, messages: list[Message] = messages) -> None:
                messages.append(message)

            await self._app(dict(scope), _again(body, receive), hold)
        for message in messages:
            if message["type"] == "http.response.start":
                header = (HEADER_POLICY.encode(), str(version).encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)


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


SECONDS_TO_ANSWER = 60.0
"""A server on a busy machine, or amid an exchange of weights, takes its time; one that is gone is missed at once."""
_COUNTERS = {
    "vllm:prompt_tokens_total": "tokens_prefilled",
    "vllm:prefix_cache_hits_total": "tokens_reused",
    "vllm:generation_tokens_total": "tokens_decoded",
}


def read_counters(urls: Iterable[str]) -> dict[str, float]:
    """tokens_prefilled, tokens_reused, tokens_decoded since the start, over all servers; EngineError if one is gone."""
    totals = dict.fromkeys(_COUNTERS.values(), 0.0)
    with httpx.Client(timeout=SECONDS_TO_ANSWER, trust_env=False) as client:
        for url in urls:
            try:
                reply = client.get(f"{url.removesuffix('/v1')}/metrics")
            except httpx.TransportError as error:
                raise EngineError(
                    f"The vLLM server at {url} does not answer ({type(error).__name__}). Resume the run from its last "
                    f"checkpoint."
                ) from error
            for name, value in _parsed(reply.text):
                totals[name] += value
    return totals


def _parsed(exposition: str) -> Iterator[tuple[str, float]]:
    """agl's names and values of the counters in Prometheus' text format."""
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        if name in _COUNTERS:
            yield _COUNTERS[name], float(rest.rpartition("}")[2].split()[0])
