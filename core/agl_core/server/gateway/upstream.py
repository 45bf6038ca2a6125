"""The model servers: which of several answers a request, what they refuse, and whether there are any.

A rollout stays with one server, where the beginning of its prompts is cached. It moves if that server is away, or has
much more to do than another. A new rollout goes to the server with the fewest requests under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import orjson

from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.server.endpoint import BrokenReplyError, Endpoint
from agl_core.server.errors import CONTEXT_OVERFLOW, UPSTREAM_GONE, ApiError, no_upstream
from agl_core.types import AttemptKey, Json
from agl_core.wire.headers import HEADER_ROLLOUT

if TYPE_CHECKING:
    from agl_core.server.attempt import ActiveAttempt

logger = logging.getLogger(__name__)

OVERLOADED, SLACK = 2, 8
"""A rollout leaves a server that has this many times as many requests as the least busy one, and so many more."""
REST = 5.0
"""Seconds for which a server that could not be reached is left alone. Then it gets one request at a time, until one
succeeds."""
MAX_ROLLOUTS = 65_536
"""Rollouts whose server is remembered; an older one counts as new."""
_IDLE = 4.0
"""Seconds an idle connection is kept: less than the 5 after which uvicorn, vLLM's server, closes it."""
_CONNECT = 10.0
_PROXYS_OWN = frozenset({502, 503, 504})
"""What a proxy answers for a server that is away."""
_OVERFLOW_PHRASES = (CONTEXT_OVERFLOW, "maximum context length", "longer than the maximum model length")
_OF_REQUESTS = (400, 404, 422)
"""Statuses of refusals that may be for what a request has."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    under_way: int = 0
    rollouts: int = 0
    """Those that it is remembered for."""
    away_since: float | None = None
    """When it was last missed; None: it answered since."""


class Router:
    """Assigns requests to servers, and learns from what became of them.

    with router.lent(rollout) as url:
        ...  # then router.mark(url, away=…)
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = {url: _Server(url) for url in urls}
        self._clock = clock
        self._home: OrderedDict[str, _Server] = OrderedDict()

    @property
    def under_way(self) -> dict[str, int]:
        """How many requests each server has."""
        return {url: server.under_way for url, server in self._servers.items()}

    @contextmanager
    def lent(self, rollout: str, tried: Collection[str] = ()) -> Iterator[str]:
        """A server for one request of a rollout ("" for none), which is part of its load meanwhile.

        `tried`: servers where this request failed; they are chosen only if there is no other.
        """
        server = self._chosen(rollout, tried)
        server.under_way += 1
        try:
            yield server.url
        finally:
            server.under_way -= 1

    def of(self, rollout: str) -> str:
        """A rollout's server, for a request that is no load worth counting."""
        return self._chosen(rollout, ()).url

    def mark(self, url: str, *, away: bool) -> None:
        """A server answered, or is `away`: it cannot be reached, or broke off."""
        self._servers[url].away_since = self._clock() if away else None

    def has_other(self, tried: Collection[str]) -> bool:
        """Whether there is a server that a request has not tried, and that may be there."""
        return any(self._may_be_there(server) for url, server in self._servers.items() if url not in tried)

    def _chosen(self, rollout: str, tried: Collection[str]) -> _Server:
        untried = [server for url, server in self._servers.items() if url not in tried] or [*self._servers.values()]
        there = [server for server in untried if self._may_be_there(server)] or untried
        least = min(there, key=lambda server: (server.under_way, server.rollouts))
        home = self._home.get(rollout)
        if home is None or home not in there or home.under_way > OVERLOADED * least.under_way + SLACK:
            home = least
        if rollout:
            before = self._home.pop(rollout, None)
            if before is not None:
                before.rollouts -= 1
            self._home[rollout] = home
            home.rollouts += 1
            if len(self._home) > MAX_ROLLOUTS:
                self._home.popitem(last=False)[1].rollouts -= 1
        return home

    def _may_be_there(self, server: _Server) -> bool:
        if server.away_since is None:
            return True
        return server.under_way == 0 and self._clock() >= server.away_since + REST


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
            url: Endpoint(f"{url.rstrip('/')}/chat/completions", headers, connect=_CONNECT, idle=_IDLE)
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
                    status, headers, payload = await self._post(url, stamp, sent)
                except ApiError as refused:
                    tried.append(url)
                    if refused.code not in UPSTREAM_GONE or not self.router.has_other(tried):
                        raise
                    logger.warning("%s Another server is asked.", refused)
                    continue
            if status != 200:
                raise _refused(status, payload, url, body)
            return payload, headers

    async def _post(self, url: str, stamp: Mapping[str, str], sent: bytes) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._endpoints[url].post(stamp, sent)
        except TimeoutError as error:
            problem = f"did not answer in {self._timeout:g} seconds."
            raise _failed(504, f"The model server at {url} {problem}", "upstream_timeout") from error
        except BrokenReplyError as error:
            self.router.mark(url, away=True)
            problem = f"The model server at {url} broke off its reply ({error})."
            raise _failed(502, problem, "upstream_broken") from error
        except OSError as error:
            self.router.mark(url, away=True)
            problem = f"The model server at {url} cannot be reached ({error}). Is the engine running?"
            raise _failed(502, problem, "upstream_down") from error
        self.router.mark(url, away=reply.status in _PROXYS_OWN)
        if reply.status in _PROXYS_OWN:
            raise _refused(reply.status, reply.body, url, {})
        return reply.status, reply.headers, reply.body


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


def _refused(status: int, payload: bytes, url: str, body: Mapping[str, Json]) -> ApiError:
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
    unusual = list(_unusual(body)) if status in _OF_REQUESTS and code != CONTEXT_OVERFLOW else ()
    if unusual:
        message = (
            f"{message.rstrip()} The request has what this model server may not take: {'; '.join(unusual)}. Leave it "
            "out, or use a model that takes it."
        )
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


def _unusual(body: Mapping[str, Json]) -> Iterator[str]:
    """Tools that are no functions, and the first part of a message that is no text."""
    for index, tool in enumerate(body.get("tools") or ()):
        if tool.get("type") != "function":
            yield f"tools[{index}] is of type {tool.get('type')!r}"
    for number, message in enumerate(body.get("messages") or ()):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") not in ("text", "refusal"):
                yield f"messages[{number}].content[{index}] is of type {part.get('type')!r}"
                return
