"""Replies of one policy version from their first token to their last, whatever veRL does with the weights meanwhile.

While weights are exchanged no request is let through. A reply that was begun before is thrown away and sampled anew
afterwards: its caller notices nothing but the time. A stream that has begun cannot be taken back. The exchange waits
for its end, but not for long; one that takes longer ends with an error. A header names the version; agl's gateway
records it.

Nothing here imports vLLM: the gate is pure ASGI, and servers' counters are read over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterable, Iterator

import httpx
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError

OPEN = frozenset({"/health", "/metrics"})
"""Routes that everyone may read: they say nothing of prompts and replies."""
SECONDS_TO_END = 30.0
"""For streams that have begun when weights are to be exchanged: clients do not ask again for one that is cut off, so it
often costs the attempt. Where nothing streams, an exchange does not wait."""
_REFUSED = 1008
"""A WebSocket's code for it: what goes over one could not be taken back, so none is opened."""
_CUT_OFF = b'data: {"error": {"message": "The weights changed before the end of this reply. Ask again."}}\n\n'


class Gate:
    """Shut until the first weights are there."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        """By policy, of the weights behind it."""
        self.closings = 0
        """How often what was under way was disturbed."""
        self.streams = set[asyncio.Future[None]]()
        """The ends of replies of which clients have a part."""
        self._open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Let nothing in. When the streams have ended, or after so many seconds, what is under way is disturbed."""
        self._open.clear()
        if self.streams:
            await asyncio.wait(self.streams, timeout=seconds)
        self.closings += 1

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    async def enter(self, body: bytes) -> tuple[int, int]:
        """Wait until it is open. The version of the policy that a request names, and how often the gate was shut."""
        while not self.is_open:
            await self._open.wait()
        return self.versions.get(self._policy(body), 0), self.closings

    def _policy(self, body: bytes) -> str:
        """The policy that answers a request."""
        if len(self.versions) > 1:
            with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
                return str(orjson.loads(body).get("model"))
        return next(iter(self.versions), "")


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
        while True:
            reply = _Reply(gate, *await gate.enter(body), send)
            try:
                await self._app(dict(scope), _again(body, receive), reply.take)
            finally:
                reply.ended.set_result(None)
                gate.streams.discard(reply.ended)
            if reply.has_begun or not reply.is_disturbed:
                await reply.send_held()
                return


class _Reply:
    """One try at a reply: held back until it is whole and known to be of one version; a stream goes out as it comes."""

    def __init__(self, gate: Gate, version: int, closings: int, send: Send) -> None:
        self.has_begun = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gate, self._version, self._closings, self._send = gate, version, closings, send
        self._held = list[Message]()

    @property
    def is_disturbed(self) -> bool:
        """True if weights were exchanged meanwhile."""
        return self._gate.closings != self._closings

    async def take(self, message: Message) -> None:
        """What the app sends."""
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            header = (HEADER_POLICY.encode(), str(self._version).encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        elif self.has_begun and self.is_disturbed and body:
            await self._send({"type": "http.response.body", "body": _CUT_OFF})
            self._send = _drop
        elif body.startswith(b"data:") and self._gate.is_open and not self.is_disturbed:
            # Not one that would begin at a closing gate: it need not hurry, since it can be sampled anew.
            self.has_begun = True
            self._gate.streams.add(self.ended)
        self._held.append(message)
        if self.has_begun:
            await self.send_held()

    async def send_held(self) -> None:
        """Send what was held back."""
        while self._held:
            await self._send(self._held.pop(0))


async def _drop(message: Message) -> None:
    """Send nothing."""


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
