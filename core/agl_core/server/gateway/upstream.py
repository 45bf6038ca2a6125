"""The model server: the client that the gateway has of it, and the relay that knows whether there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import orjson

from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.server.errors import CONTEXT_OVERFLOW, UPSTREAM_GONE, ApiError, no_upstream
from agl_core.server.gateway.routing import Router
from agl_core.server.http.client import BrokenReplyError, Endpoint
from agl_core.types import AttemptKey, Json
from agl_core.wire.headers import HEADER_ROLLOUT

if TYPE_CHECKING:
    from agl_core.server.rollouts.attempt import ActiveAttempt

logger = logging.getLogger(__name__)

_KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept: less than the 5 after which uvicorn, vLLM's server, closes it."""
_CONNECT = 10.0
_PROXYS_OWN = frozenset({502, 503, 504})
"""What a proxy answers for a server that is away."""
_OVERFLOW_PHRASES = (CONTEXT_OVERFLOW, "maximum context length", "longer than the maximum model length")


class UpstreamClient:
    """Forwards chat completions; every failure becomes a `ApiError` that says what is wrong with which server."""

    def __init__(self, upstream: Upstream, timeout: float) -> None:
        headers = {
            "Authorization": f"Bearer {upstream.api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        self.router = Router(upstream.urls)
        """Also for requests to these servers that others send."""
        self._endpoints = {
            url: Endpoint(f"{url.rstrip('/')}/chat/completions", headers, connect=_CONNECT, idle=_KEEP_ALIVE)
            for url in upstream.urls
        }
        self._timeout = timeout

    def close(self) -> None:
        """Keep no connections any more; what is in flight goes on."""
        for endpoint in self._endpoints.values():
            endpoint.close()

    async def complete(self, body: Mapping[str, Json], key: AttemptKey | None) -> tuple[bytes, Mapping[str, str]]:
        """POST a chat completion, of an attempt or of none; the reply's body and headers if its status is 200.

        A server that cannot be reached, or breaks off, costs an attempt nothing while there is another.
        """
        rollout = "" if key is None else key.rollout
        stamp = {} if key is None else {HEADER_ROLLOUT: f"{key.rollout}/{key.attempt}"}
        sent, tried = orjson.dumps(body), list[str]()
        while True:
            with self.router.lent(rollout, tried) as url:
                try:
                    return await self._ask(url, stamp, sent)
                except ApiError as refused:
                    tried.append(url)
                    if refused.code not in UPSTREAM_GONE or not self.router.has_other(tried):
                        raise
                    logger.warning("%s Another server is asked.", refused)

    async def _ask(self, url: str, stamp: Mapping[str, str], sent: bytes) -> tuple[bytes, Mapping[str, str]]:
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._endpoints[url].post(stamp, sent)
        except TimeoutError as error:
            raise _failed(
                504, f"The model server at {url} did not answer in {self._timeout:g} seconds.", "upstream_timeout"
            ) from error
        except BrokenReplyError as error:
            self.router.missed(url)
            raise _failed(
                502, f"The model server at {url} broke off its reply ({error}).", "upstream_broken"
            ) from error
        except OSError as error:
            self.router.missed(url)
            raise _failed(
                502, f"The model server at {url} cannot be reached ({error}). Is the engine running?", "upstream_down"
            ) from error
        if reply.status in _PROXYS_OWN:
            self.router.missed(url)
        else:
            self.router.found(url)
        if reply.status != 200:
            raise _refused(reply.status, reply.body, url)
        return reply.body, reply.headers


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run's rollouts are sampled, and how often they are tried."""

    sampling: SamplingSection | None
    """None: as the agents ask."""
    seed: int
    timeout: float
    """Seconds an attempt may take."""
    attempts: int
    """Tries per rollout."""
    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By policy, the agents that it answers."""


@dataclass(frozen=True, eq=False)
class Destination:
    """What answers model calls, and how they are sampled."""

    upstream: Upstream
    settings: RunSettings
    client: UpstreamClient
    versions: Mapping[str, int]
    """The version of each policy, for replies that do not name it."""


class Answering(Protocol):
    """Says what answers model calls. All methods belong to the server's event loop."""

    def served(self) -> Destination:
        """What answers in general; ApiError 503 if nothing does."""

    def answering(self, attempt: ActiveAttempt) -> AbstractContextManager[Destination]:
        """What answers a call of this attempt, as long as the block lasts; ApiError 503 if nothing does."""


class Relay:
    """The current model server. `lend` is called with whether there is one, so that rollouts wait while there is none.

    `versions` maps policies to versions, for upstreams that do not name theirs.
    """

    def __init__(self, lend: Callable[[bool], None]) -> None:
        self.versions: dict[str, int] = {}
        self._lend = lend
        self._served: Destination | None = None

    @property
    def is_there(self) -> bool:
        return self._served is not None

    def served(self) -> Destination:
        """What answers; ApiError 503 if nothing does."""
        if self._served is None:
            raise no_upstream()
        return self._served

    @contextmanager
    def answering(self, attempt: ActiveAttempt) -> Iterator[Destination]:
        yield self.served()

    def serve(self, upstream: Upstream, settings: RunSettings) -> None:
        """Forward to this one from now on."""
        self.withdraw()
        self._served = Destination(upstream, settings, UpstreamClient(upstream, settings.timeout), self.versions)
        self._lend(True)

    def withdraw(self) -> None:
        """Forward nowhere; calls in flight go on."""
        self._lend(False)
        served, self._served = self._served, None
        if served is not None:
            served.client.close()


def _failed(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, type="upstream_error", code=code)


def _refused(status: int, payload: bytes, url: str) -> ApiError:
    """A status other than 200. 4xx is the agent's affair and is passed on; the rest is not."""
    error = _error_object(payload)
    message = str(error.get("message") or payload[:500].decode("utf-8", "replace"))
    if status in (401, 403):
        return _failed(502, f"The model server at {url} refuses agl's own API key: {message}", "upstream_key")
    if not 400 <= status < 500:
        failure = "upstream_away" if status in _PROXYS_OWN else "upstream_failed"
        return _failed(502, f"The model server at {url} answered {status}: {message}", failure)
    code = error.get("code")
    if any(phrase in f"{code} {message}" for phrase in _OVERFLOW_PHRASES):
        code = CONTEXT_OVERFLOW
    kind, param = error.get("type"), error.get("param")
    return ApiError(
        status,
        message,
        type=kind if isinstance(kind, str) else "invalid_request_error",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def _error_object(payload: bytes) -> Mapping[str, Json]:
    """The error in OpenAI's shape, in older vLLM's (fields at the top) or in FastAPI's (`detail`)."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(body, dict):
        return {}
    inner = body.get("error")
    if isinstance(inner, dict):
        return inner
    if isinstance(inner, str):
        return {"message": inner}
    if "detail" in body:
        return {"message": orjson.dumps(body["detail"]).decode()}
    return body
