"""The model servers: which one answers a request, the connections to them, and their errors.

A rollout begins at the least busy server and stays there, where the beginning of its prompts is cached, unless that
server is away or much busier than another.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import orjson
from msgspec.structs import replace

from agl_core.apis.errors import CONTEXT_OVERFLOW, ENGINE_FAILED, UPSTREAM_GONE, ApiError, no_upstream, read_error
from agl_core.apis.reply import not_a_completion
from agl_core.apis.streamed import LAST_EVENT, EventReader
from agl_core.capture.requests import HEADER_MOVED, HEADER_ROLLOUT
from agl_core.config.models import PromptSection, SamplingSection
from agl_core.learning.transitions import DISTORTING
from agl_core.protocols import Upstream
from agl_core.types import AttemptKey, Json, Sampling
from agl_core.types.forms import parse_json
from agl_server.gateway.endpoint import Endpoint, HttpReply

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
        """Close idle connections; what is in flight goes on."""
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
    """The chunk of a server-sent event; ApiError if it is none, or reports an error.

    It adds to the finish `reasons` of the choices, which are None before their end.
    """
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


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run's rollouts are sampled, and how often they are tried."""

    sampling: SamplingSection | None
    """None: as agents ask."""
    seed: int
    timeout: float
    """Seconds an attempt may take."""
    attempts: int
    """Tries per rollout."""
    agents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By policy: the agents that it answers."""
    prompts: Mapping[str, PromptSection] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Destination:
    """The model server that answers calls, and how they are sampled."""

    upstream: Upstream
    settings: RunSettings
    client: UpstreamClient
    versions: Mapping[str, int]
    """By policy, for replies that do not name their version."""


class Relay:
    """The current model server, if any. Used on the server's event loop.

    `lend` is called with whether there is one, so that rollouts wait while there is none.
    """

    def __init__(self, lend: Callable[[bool], None] = lambda lending: None) -> None:
        self.versions: dict[str, int] = {}
        self._lend = lend
        self._destination: Destination | None = None

    @property
    def is_there(self) -> bool:
        return self._destination is not None

    def current_destination(self) -> Destination:
        """ApiError 503 if there is none."""
        if self._destination is None:
            raise no_upstream()
        return self._destination

    @contextmanager
    def acquire_destination(self, group: str) -> Iterator[Destination]:
        """The destination of a call of this group, held until the block ends; ApiError 503 if there is none."""
        yield self.current_destination()

    def serve(self, upstream: Upstream, settings: RunSettings) -> None:
        """Forward to this model server from now on."""
        self.withdraw()
        self._destination = Destination(upstream, settings, UpstreamClient(upstream, settings.timeout), self.versions)
        self._lend(True)

    def withdraw(self) -> None:
        """Refuse new calls; those in flight go on."""
        self._lend(False)
        destination, self._destination = self._destination, None
        if destination is not None:
            destination.client.close()


def forwarded(
    upstream: Upstream, chat: Mapping[str, Json], effective: Sampling, policy: str, *, trains: bool
) -> dict[str, Json]:
    """The body that the upstream gets."""
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
