"""The model servers: which of several answers a request, the connections to them, and what they refuse.

A rollout stays with one server, where the beginning of its prompts is cached. It moves if that server is away, or has
much more to do than another. A new rollout goes to a server with the fewest requests under way.

General HTTP clients take longer to prepare a request than the gateway takes for all the rest of a call. `Endpoint`
prepares once what is the same for every request, and httptools reads the replies.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

import httptools
import orjson

from agl_core.apis.errors import CONTEXT_OVERFLOW, UPSTREAM_GONE, ApiError, no_upstream
from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.types import AttemptKey, Json
from agl_core.types.forms import parse_json
from agl_core.wire.headers import HEADER_ROLLOUT

if TYPE_CHECKING:
    from agl_core.server.keys import ActiveAttempt

logger = logging.getLogger(__name__)

OVERLOADED, SLACK = 2, 8
"""A rollout leaves a server that has this many times as many requests as the least busy one, and so many more."""
REST = 5.0
"""Seconds for which a server that could not be reached is left alone."""
MAX_ROLLOUTS = 65_536
"""Rollouts whose server is remembered; an older one counts as new."""
_IDLE = 4.0
"""Seconds an idle connection is kept: less than the 5 after which uvicorn, vLLM's server, closes it."""
_CONNECT = 10.0
_PROXYS_OWN = frozenset({502, 503, 504})
"""The statuses by which a proxy answers for a server that is away."""
_OVERFLOW_PHRASES = (CONTEXT_OVERFLOW, "maximum context length", "longer than the maximum model length")
_ERROR_FIELDS = ("type", "param", "code")
_FIRST_FINAL_STATUS = 200
"""Replies below are interim ones."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; of those that came several times, the last."""
    body: bytes


class Endpoint:
    """One URL to POST to, with headers that every request has, over connections with one request at a time each.

    Times are in seconds: `timeout` for a reply, `connect` for a connection, `idle` to keep one that is not used.
    The last has to be less than the server's, which would otherwise close a connection just when a request is sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, connect: float, idle: float) -> None:
        self.under_way = 0
        """Requests that it has."""
        self.away_since = float("-inf")
        """When it was last missed, unless it answered since."""
        self._url = urlsplit(url)
        self._timeout, self._connect, self._keep = timeout, connect, idle
        target = self._url.path + (f"?{self._url.query}" if self._url.query else "")
        host = self._url.netloc.rpartition("@")[2]
        self._head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\n".encode() + _lines(headers)
        self._idle: deque[tuple[_Connection, float]] = deque()
        self._closed = False

    async def post(self, headers: Mapping[str, str], body: bytes) -> HttpReply:
        """The reply. TimeoutError if it takes longer; OSError if it did not come whole, or the server is not there.

        If it is cancelled, so is the request: its connection is closed.
        """
        connection = self._kept() or await self._new()
        late = asyncio.get_running_loop().call_later(self._timeout, connection.fail, TimeoutError())
        try:
            request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, _lines(headers), len(body), body)
            reply = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()
        self._keep_for_later(connection)
        return reply

    def close(self) -> None:
        """Keep no connections any more; what is in flight goes on."""
        self._closed = True
        while self._idle:
            self._idle.pop()[0].close()

    def _kept(self) -> _Connection | None:
        """The connection that was used last, if there is one that is still good."""
        oldest = asyncio.get_running_loop().time() - self._keep
        while self._idle:
            connection, since = self._idle.pop()
            if connection.is_open and since > oldest:
                return connection
            connection.close()
        return None

    def _keep_for_later(self, connection: _Connection) -> None:
        now = asyncio.get_running_loop().time()
        if self._closed:
            connection.close()
        if connection.is_open:
            self._idle.append((connection, now))
        while self._idle and self._idle[0][1] < now - self._keep:
            self._idle.popleft()[0].close()

    async def _new(self) -> _Connection:
        url = self._url
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect):
                _, connection = await loop.create_connection(
                    _Connection, url.hostname or "", url.port or (80 if self._tls is None else 443), ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {self._connect:g} seconds") from error
        return connection

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self._url.scheme == "https" else None


class _Connection(asyncio.Protocol):
    """One connection; it closes itself once it cannot carry another request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[HttpReply] | None = None
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, request: bytes) -> asyncio.Future[HttpReply]:
        if not self.is_open:
            raise ConnectionError("it closed the connection")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"what it sent is no HTTP: {error}"))

    def eof_received(self) -> None:
        if self._waiting is not None and self._ends_with_the_connection:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(ConnectionError(str(error or "it closed the connection")))

    def on_message_begin(self) -> None:
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self._parser.should_keep_alive():
            self.close()
        if waiting is not None and not waiting.done():
            waiting.set_result(HttpReply(status, self._headers, b"".join(self._body)))

    @property
    def _ends_with_the_connection(self) -> bool:
        return bool(self._headers) and not {"content-length", "transfer-encoding"} & self._headers.keys()

    def fail(self, error: OSError) -> None:
        """End the request under way with this error."""
        self.close()
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines.encode()


class UpstreamClient:
    """Forwards chat completions; every failure becomes a `ApiError` that says what is wrong with which server."""

    def __init__(self, upstream: Upstream, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        headers = {
            "Authorization": f"Bearer {upstream.api_key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
        self._servers = {
            url: Endpoint(f"{url.rstrip('/')}/chat/completions", headers, timeout=timeout, connect=_CONNECT, idle=_IDLE)
            for url in upstream.urls
        }
        self._timeout, self._clock = timeout, clock
        self._home: OrderedDict[str, str] = OrderedDict()
        """Each rollout's server."""

    def close(self) -> None:
        """Keep no connections any more; what is in flight goes on."""
        for server in self._servers.values():
            server.close()

    async def complete(self, body: Mapping[str, Json], key: AttemptKey | None) -> tuple[bytes, Mapping[str, str]]:
        """POST a chat completion, of an attempt or of none; the reply's body and headers if its status is 200.

        A server that cannot be reached, or breaks off, costs an attempt nothing while there is another.
        """
        rollout = "" if key is None else key.rollout
        stamp = {} if key is None else {HEADER_ROLLOUT: f"{key.rollout}/{key.attempt}"}
        sent, tried = orjson.dumps(body), list[str]()
        while True:
            url = self.server_of(rollout, tried)
            server = self._servers[url]
            server.under_way += 1
            try:
                reply = await self._post(url, stamp, sent)
            except ApiError as refused:
                tried.append(url)
                if refused.code != UPSTREAM_GONE or not (self._there() - {*tried}):
                    raise
                logger.warning("%s Another server is asked.", refused)
            else:
                return reply.body, reply.headers
            finally:
                server.under_way -= 1

    def server_of(self, rollout: str, tried: Sequence[str] = ()) -> str:
        """The server for a request of a rollout, "" for none; one of those that were `tried` only if all were."""
        if len(self._servers) == 1:
            return next(iter(self._servers))
        untried = self._servers.keys() - {*tried} or self._servers.keys()
        there = untried & self._there() or untried
        least = min(there, key=lambda url: (self._servers[url].under_way, random.random()))
        home = self._home.pop(rollout, least)
        if home not in there or self._servers[home].under_way > OVERLOADED * self._servers[least].under_way + SLACK:
            home = least
        if rollout:
            self._home[rollout] = home
            if len(self._home) > MAX_ROLLOUTS:
                self._home.popitem(last=False)
        return home

    def _there(self) -> set[str]:
        """The servers that were not missed just now."""
        recently = self._clock() - REST
        return {url for url, server in self._servers.items() if server.away_since <= recently}

    async def _post(self, url: str, stamp: Mapping[str, str], sent: bytes) -> HttpReply:
        server = self._servers[url]
        try:
            reply = await server.post(stamp, sent)
        except TimeoutError as error:
            problem = f"did not answer in {self._timeout:g} seconds."
            raise _failed(504, f"The model server at {url} {problem}", "upstream_timeout") from error
        except OSError as error:
            server.away_since = self._clock()
            problem = f"The model server at {url} cannot be reached, or broke off ({error}). Is the engine running?"
            raise _failed(502, problem, UPSTREAM_GONE) from error
        server.away_since = self._clock() if reply.status in _PROXYS_OWN else float("-inf")
        if reply.status != 200:
            raise _refused(reply.status, reply.body, url)
        return reply


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
    """The model server that answers calls, and how they are sampled."""

    upstream: Upstream
    settings: RunSettings
    client: UpstreamClient
    versions: Mapping[str, int]
    """The version of each policy, for replies that do not name it."""


class DestinationProvider(Protocol):
    """Knows what answers model calls. All methods belong to the server's event loop."""

    def current_destination(self) -> Destination:
        """The destination in general; ApiError 503 if there is none."""

    def acquire_destination(self, attempt: ActiveAttempt) -> AbstractContextManager[Destination]:
        """The destination of a call of this attempt, for as long as the block lasts; ApiError 503 if there is none."""


class Relay:
    """The current model server. `lend` is called with whether there is one, so that rollouts wait while there is none.

    `versions` maps policies to versions, for upstreams that do not name theirs.
    """

    def __init__(self, lend: Callable[[bool], None]) -> None:
        self.versions: dict[str, int] = {}
        self._lend = lend
        self._destination: Destination | None = None

    @property
    def is_there(self) -> bool:
        return self._destination is not None

    def current_destination(self) -> Destination:
        """The current destination; ApiError 503 if there is none."""
        if self._destination is None:
            raise no_upstream()
        return self._destination

    @contextmanager
    def acquire_destination(self, attempt: ActiveAttempt) -> Iterator[Destination]:
        yield self.current_destination()

    def serve(self, upstream: Upstream, settings: RunSettings) -> None:
        """Forward to this one from now on."""
        self.withdraw()
        self._destination = Destination(upstream, settings, UpstreamClient(upstream, settings.timeout), self.versions)
        self._lend(True)

    def withdraw(self) -> None:
        """Forward nowhere; calls in flight go on."""
        self._lend(False)
        destination, self._destination = self._destination, None
        if destination is not None:
            destination.client.close()


def _failed(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, type="upstream_error", code=code)


def _refused(status: int, payload: bytes, url: str) -> ApiError:
    """A status other than 200. 4xx is the agent's affair and is passed on; the rest is not."""
    error = _error_object(payload)
    message = str(error.get("message") or payload[:500].decode("utf-8", "replace"))
    if status in (401, 403):
        return _failed(502, f"The model server at {url} refuses agl's own API key: {message}", "upstream_key")
    if not 400 <= status < 500:
        failure = UPSTREAM_GONE if status in _PROXYS_OWN else "upstream_failed"
        return _failed(502, f"The model server at {url} answered {status}: {message}", failure)
    kind, param, code = (text if isinstance(text := error.get(name), str) else None for name in _ERROR_FIELDS)
    if any(phrase in f"{code} {message}" for phrase in _OVERFLOW_PHRASES):
        code = CONTEXT_OVERFLOW
    return ApiError(status, message, type=kind or "invalid_request_error", param=param, code=code)


def _error_object(payload: bytes) -> Mapping[str, Json]:
    """The error in OpenAI's shape, in older vLLM's (fields at the top) or in FastAPI's (`detail`)."""
    try:
        body = parse_json(payload)
        error = body.get("error", body)
        if isinstance(error, str):
            return {"message": error}
        return {"message": orjson.dumps(error["detail"]).decode(), **error} if "detail" in error else {**error}
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return {}
