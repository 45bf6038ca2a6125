"""The model servers: which one answers a request, the connections to them, and their errors.

A rollout begins at the least busy server and stays there, where the beginning of its prompts is cached, unless that
server is away or much busier than another.

General HTTP clients take longer to prepare a request than the gateway takes for the rest of a call. `Endpoint` prepares
the common part once, and httptools reads the replies.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import httptools
import orjson
from msgspec import Struct
from msgspec.structs import replace

from agl_core.apis.errors import CONTEXT_OVERFLOW, ENGINE_FAILED, UPSTREAM_GONE, ApiError, read_error
from agl_core.apis.reply import not_a_completion
from agl_core.apis.streamed import LAST_EVENT, EventReader
from agl_core.apis.streams import STREAM_TYPE
from agl_core.capture.requests import HEADER_MOVED, HEADER_ROLLOUT
from agl_core.learning.transitions import DISTORTING
from agl_core.protocols import Upstream
from agl_core.types import AttemptKey, Json, Sampling
from agl_core.types.forms import parse_json

logger = logging.getLogger(__name__)

OVERLOADED, SLACK = 2, 8
"""A rollout leaves a server with more than this factor times the least busy one's requests, plus so many."""
REST = 5.0
"""Seconds without requests for a server that could not be reached."""
MAX_ROLLOUTS = 65_536
"""Rollouts whose server is remembered; the oldest goes first."""
_IDLE = 4.0
"""Seconds an idle connection is kept; uvicorn, vLLM's server, closes it after 5."""
_CONNECT = 10.0
_PROXYS_OWN = frozenset({502, 503, 504})
"""A proxy's statuses for a server that is away."""
_OVERFLOW_PHRASES = (CONTEXT_OVERFLOW, "maximum context length", "longer than the maximum model length")
_ERROR_FIELDS = ("type", "param", "code")
MAX_UNREAD = 256 << 10
"""Bytes of a streamed reply that may wait for a slow client, before reading from the model server pauses."""
_FIRST_FINAL_STATUS = 200
"""Lower ones are interim."""

Chunks: TypeAlias = AsyncGenerator[list[Mapping[str, Any]], None]
"""The chunks of a reply as they come; to be closed. ApiError if it breaks off, or the server reports an error."""


class UpstreamClient:
    """Forwards chat completions; each failure becomes an `ApiError` that names the server and what is wrong."""

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
        self._home: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Each rollout's server, and whether it had another one before."""

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    async def complete(self, body: Mapping[str, Json], key: AttemptKey | None, *, streamed: bool = False) -> HttpReply:
        """POST a chat completion, of an attempt or of none; a reply with status 200, whose parts are `Chunks`.

        Another server is asked if one cannot be reached or breaks off, unless a `streamed` reply has begun.
        """
        rollout = "" if key is None else key.rollout
        stamp = {} if key is None else {HEADER_ROLLOUT: f"{key.rollout}/{key.attempt}"}
        sent, tried = orjson.dumps(body), list[str]()
        while True:
            url = self.server_of(rollout, tried)
            try:
                with self._asking(url) as server:
                    moved = {HEADER_MOVED: "1"} if self._home.get(rollout, ("", False))[1] else {}
                    reply = await server.post(stamp | moved, sent, streamed=streamed)
                    server.away_since = self._clock() if reply.status in _PROXYS_OWN else float("-inf")
                    if reply.status != 200:
                        raise _refused(reply.status, reply.body, url)
            except ApiError as refused:
                tried.append(url)
                if refused.code != UPSTREAM_GONE or not (self._there() - {*tried}):
                    raise
                logger.warning("%s Another server is asked.", refused)
            else:
                return reply if reply.parts is None else replace(reply, parts=self._chunks(url, reply.parts))

    def server_of(self, rollout: str, tried: Sequence[str] = ()) -> str:
        """The server for a request of a rollout ("": of none); one that was `tried` only if all were."""
        if len(self._servers) == 1:
            return next(iter(self._servers))
        untried = self._servers.keys() - {*tried} or self._servers.keys()
        there = untried & self._there() or untried
        least = min(there, key=lambda url: (self._servers[url].under_way, random.random()))
        home, has_moved = self._home.pop(rollout, (least, False))
        if home not in there or self._servers[home].under_way > OVERLOADED * self._servers[least].under_way + SLACK:
            home, has_moved = least, True
        if rollout:
            self._home[rollout] = home, has_moved
            if len(self._home) > MAX_ROLLOUTS:
                self._home.popitem(last=False)
        return home

    def _there(self) -> set[str]:
        """The servers that were not missed for `REST` seconds."""
        recently = self._clock() - REST
        return {url for url, server in self._servers.items() if server.away_since <= recently}

    async def _chunks(self, url: str, parts: AsyncGenerator[bytes, None]) -> Chunks:
        reader, reasons, is_over = EventReader(), dict[int, object](), False

        def read(events: Sequence[bytes]) -> list[Mapping[str, Any]]:
            nonlocal is_over
            is_over |= LAST_EVENT in events
            return [_chunk(event, url, reasons) for event in events if event != LAST_EVENT]

        with self._asking(url):
            async with aclosing(parts):
                async for part in parts:
                    if chunks := read(reader.feed(part)):
                        yield chunks
            if chunks := read(reader.end()):
                yield chunks
            if not is_over and not (reasons and all(reasons.values())):
                raise ConnectionError(f"its stream ended without a finish reason or {LAST_EVENT.decode()}")

    @contextmanager
    def _asking(self, url: str) -> Iterator[Endpoint]:
        """Count a request of a server, and turn errors of its connection into an ApiError."""
        server = self._servers[url]
        server.under_way += 1
        try:
            yield server
        except ApiError:
            raise
        except TimeoutError as error:
            problem = f"did not answer in {self._timeout:g} seconds."
            raise _failed(504, f"The model server at {url} {problem}", "upstream_timeout") from error
        except OSError as error:
            server.away_since = self._clock()
            problem = f"The model server at {url} cannot be reached, or broke off ({error}). Is the engine running?"
            raise _failed(502, problem, UPSTREAM_GONE) from error
        finally:
            server.under_way -= 1


def _chunk(event: bytes, url: str, reasons: dict[int, object]) -> Mapping[str, Any]:
    """The chunk of a server-sent event, added to the finish `reasons`; ApiError if it is none, or reports an error."""
    try:
        chunk = parse_json(event)
        failed = chunk.get("error")
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            reasons[index] = choice.get("finish_reason") or reasons.get(index)
    except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
        raise not_a_completion(error, event) from error
    if failed:
        status = failed.get("code") if isinstance(failed, dict) else None
        raise _refused(status if type(status) is int and 400 <= status < 500 else 500, event, url)
    return cast(Mapping[str, Any], chunk)


def forwarded(
    upstream: Upstream, chat: Mapping[str, Json], effective: Sampling, policy: str, *, trains: bool
) -> dict[str, Json]:
    body = {name: value for name, value in chat.items() if not (trains and name in DISTORTING)}
    if not body.get("tools"):  # Chat templates may take an empty list for tools.
        body.pop("tools", None)
        if body.get("tool_choice") in ("auto", "none"):
            del body["tool_choice"]
    body["model"] = upstream.models[policy]
    sampling = ((name, getattr(effective, name)) for name in Sampling.__dataclass_fields__)
    body.update({name: value for name, value in sampling if value is not None})
    if upstream.returns_ids:
        body["return_token_ids"] = True
        body["logprobs"] = True
    return body


def _failed(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, type="upstream_error", code=code)


def _refused(status: int, payload: bytes, url: str) -> ApiError:
    """The error of a reply other than 200. 4xx is the agent's affair and passed on, except for agl's own key."""
    error = read_error(payload)
    message = str(error.get("message") or payload[:500].decode("utf-8", "replace"))
    if status in (401, 403):
        return _failed(502, f"The model server at {url} refuses agl's own API key: {message}", "upstream_key")
    if not 400 <= status < 500:
        is_gone = status in _PROXYS_OWN or error.get("code") == ENGINE_FAILED
        failure = UPSTREAM_GONE if is_gone else "upstream_failed"
        return _failed(502, f"The model server at {url} answered {status}: {message}", failure)
    kind, param, code = (text if isinstance(text := error.get(name), str) else None for name in _ERROR_FIELDS)
    if any(phrase in f"{code} {message}" for phrase in _OVERFLOW_PHRASES):
        code = CONTEXT_OVERFLOW
    return ApiError(status, message, type=kind or "invalid_request_error", param=param, code=code)


class HttpReply(Struct, frozen=True):
    """A reply, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; the last of several."""
    body: bytes
    parts: AsyncGenerator[Any, None] | None = None
    """The body as it comes, if it was asked for so and is an event stream; to be closed."""


class Endpoint:
    """One URL to POST to, with common headers, over connections that carry one request at a time.

    Times are in seconds: `timeout` for a reply, `connect` for a connection, `idle` to keep an unused one: less than the
    server does, which would otherwise close a connection just when a request is sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, connect: float, idle: float) -> None:
        self.under_way = 0
        self.away_since = float("-inf")
        """When it was last missed, unless it answered since."""
        self._url = urlsplit(url)
        self._timeout, self._connect, self._keep = timeout, connect, idle
        target = self._url.path + (f"?{self._url.query}" if self._url.query else "")
        host = self._url.netloc.rpartition("@")[2]
        self._head = f"POST {target} HTTP/1.1\r\nHost: {host}\r\n".encode() + _lines(headers)
        self._idle: deque[tuple[_Connection, float]] = deque()
        self._closed = False

    async def post(self, headers: Mapping[str, str], body: bytes, *, streamed: bool = False) -> HttpReply:
        """The reply; TimeoutError, or OSError if the server is away or breaks off. Cancelling closes the connection.

        A `streamed` reply returns when its body begins; `parts` raises the same errors, with the timeout for each part.
        """
        connection = self._kept() or await self._new()
        late = asyncio.get_running_loop().call_later(self._timeout, connection.fail, TimeoutError())
        try:
            request = b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, _lines(headers), len(body), body)
            reply = await connection.ask(request, streamed=streamed)
        except BaseException:
            connection.close()
            raise
        finally:
            late.cancel()
        if connection.is_streaming:
            return replace(reply, parts=self._parts(connection))
        self._keep_for_later(connection)
        return reply

    async def _parts(self, connection: _Connection) -> AsyncGenerator[bytes, None]:
        """The parts of the body under way; the connection is closed unless all are read."""
        try:
            while not connection.is_read:
                async with asyncio.timeout(self._timeout):
                    part = await connection.read()
                yield part
        finally:
            if not connection.is_read:
                connection.close()
            self._keep_for_later(connection)

    def close(self) -> None:
        """Close idle connections, and keep none; what is in flight goes on."""
        self._closed = True
        while self._idle:
            self._idle.pop()[0].close()

    def _kept(self) -> _Connection | None:
        """The connection used last, if it is still good."""
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
    """One connection, which closes itself once it cannot carry another request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        """Parts that are not read yet."""
        self._unread = 0
        """Bytes of these, in a streamed reply."""
        self._streamed, self._is_whole, self._status = False, True, 0
        self._broken: OSError | None = None
        self.is_streaming = False
        """True if the reply was asked for as a stream, and is one."""
        self._news: asyncio.Future[None] | None = None
        """Done when more of the reply is there."""

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def is_read(self) -> bool:
        return self._is_whole and not self._body

    async def ask(self, request: bytes, *, streamed: bool = False) -> HttpReply:
        """The reply; without its body if it streams."""
        self._streamed, self._is_whole, self.is_streaming = streamed, False, False
        self._transport.write(request)
        while not (self._is_whole or self.is_streaming):
            await self._wait()
        return HttpReply(self._status, self._headers, b"" if self.is_streaming else await self.read())

    async def read(self) -> bytes:
        """The body's next part; empty only at its end. OSError if it broke off."""
        while not (self._body or self._is_whole):
            await self._wait()
        parts, self._body = self._body, []
        if self._unread > MAX_UNREAD and self.is_open:
            self._transport.resume_reading()
        self._unread = 0
        return b"".join(parts)

    async def _wait(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"what it sent is no HTTP: {error}"))
        self._wake()

    def eof_received(self) -> None:
        if self._headers and not {"content-length", "transfer-encoding"} & self._headers.keys():
            self.on_message_complete()  # The body ends with the connection.

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(ConnectionError(str(error or "it closed the connection")))

    def fail(self, error: OSError) -> None:
        self.close()
        self._broken = self._broken or error
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise RuntimeError("a reply to no request")  # The parser makes it an error of its own.
        self._headers, self._body = {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        is_event_stream = self._headers.get("content-type", "").startswith(STREAM_TYPE)
        self.is_streaming = self._streamed and self._status == 200 and is_event_stream

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self.is_streaming:
            self._unread += len(data)
            if self._unread > MAX_UNREAD:
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_whole = self._status >= _FIRST_FINAL_STATUS
        if self._is_whole and not self._parser.should_keep_alive():
            self.close()


def _lines(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines.encode()
