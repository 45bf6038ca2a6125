"""The headers of model calls: on requests to the Lightning Server, whichever HTTP library sends them, and on replies.

Concurrent rollouts may share a client made at import: each request carries the attempt of the context that sends it.
Requests to other hosts are left alone; those to model APIs are counted, or, in an attempt without a server, kept with
their replies if httpx sends them.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from agl_core.capture.context import (
    HERE,
    AttemptContext,
    SentCall,
    Step,
    current_attempt,
    current_identity,
    current_scope,
    packed_variables,
)
from agl_core.capture.reports import guarded, report_problem
from agl_core.capture.watching import Patches, within
from agl_core.types import Identity

HEADER_ROLLOUT = "x-agl-rollout"
"""`ROLLOUT/ATTEMPT`: which attempt a request belongs to; the same as the path prefix /rollout/R/attempt/A."""
HEADER_AGENT = "x-agl-agent"
"""The name of the agent that makes the call, percent-encoded (`urllib.parse.unquote`)."""
HEADER_PARENT_SPAN = "x-agl-parent-span"
HEADER_STATE = "x-agl-state"
"""The agent's semantic variables at the call, as `agl_core.capture.context` packs them."""
HEADER_CALL = "x-agl-call"
"""On the server's reply: the id of the call that it answers."""
HEADER_IGNORED = "x-agl-ignored"
"""On the server's reply: the fields of the request that only tune a hosted service, and were ignored."""
HEADER_RETRIES = "x-stainless-retry-count"
"""How the clients of OpenAI and Anthropic number the retries of a request, 0 first."""
HEADER_MOVED = "x-agl-moved"
"""On a request to an upstream: its rollout was with another server before."""
HEADER_POLICY = "x-agl-policy-version"
"""On an upstream's reply: the policy version that sampled it."""

Resolver: TypeAlias = Callable[[], Identity | None]
"""Asks a framework who makes the request that is being sent; None if it does not know."""

_MAX_HEADER = 512
MODEL_CALL = re.compile(
    r"/chat/completions$|/v1/(?:completions|responses)$|:(?:stream)?(?:G|g)enerateContent$|:(?:streamR|r)awPredict$"
    r"|(?:anthropic\.com|openrouter\.ai|localhost|127\.0\.0\.1|\[::1\])(?::\d+)?/(?:.*/)?messages$|/anthropic/(?:v1/)?messages$"
    r"|\.azure\.com(?::\d+)?/.*/(?:completions|responses)$|cohere\.(?:com|ai)/v\d/chat$"
    r"|amazonaws\.com(?::\d+)?/model/.*/(?:converse|invoke)(?:-stream|-with-response-stream)?$|:11434/api/(?:chat|generate)$"
)
"""Addresses, without query; `messages` may be anybody's, and counts at hosts of models, below `/anthropic` and here."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_Send: TypeAlias = Callable[..., Any]
_SENDING: ContextVar[str | None] = ContextVar("agl_sending", default=None)
"""The URL that httpx sends a request to: its transport may be another library, as LiteLLM's is aiohttp."""


def rollout_path(rollout: str, attempt: int) -> str:
    """The path prefix before /v1 in an attempt's own base URL."""
    return f"/rollout/{rollout}/attempt/{attempt}"


class Stamper:
    """Stamps the requests of the libraries that are patched."""

    def __init__(self) -> None:
        self.resolvers: list[Resolver] = []
        """Asked where no adapter has entered an identity; in this order, the first answer counts."""

    @contextmanager
    def stamped(self, method: str, headers: MutableMapping[str, str]) -> Iterator[None]:
        """Stamp a request to the server, which is sent inside: change `headers`, whose names are in lower case."""
        active, step = current_attempt(), None
        if active is not None:
            try:
                step = _begun_step(method, headers)
                headers.update(self._headers(active, step))
                # The attempt's own key, whatever key the client has: one client may serve many attempts.
                headers["authorization"] = f"Bearer {active.api_key}"
                if "x-api-key" in headers:
                    headers["x-api-key"] = active.api_key
            except Exception as error:
                report_problem("Stamping a request", error)
        try:
            yield
        finally:
            if step is not None:
                step.steps.end_call(step)

    def _headers(self, active: AttemptContext, step: Step | None) -> dict[str, str]:
        who = current_identity() or Identity()
        if who.agent is None and who.parent_span is None:
            who = self._resolved() or who
        headers = {
            HEADER_ROLLOUT: f"{active.rollout}/{active.attempt}",
            HEADER_AGENT: who.agent,
            HEADER_PARENT_SPAN: who.parent_span or (step and step.span),
        }
        stamped = {name: header_value(value) for name, value in headers.items() if value}
        variables = packed_variables()
        return {**stamped, HEADER_STATE: variables} if variables else stamped

    def _resolved(self) -> Identity | None:
        """The first answer that names an agent, else the first answer."""
        unnamed: Identity | None = None
        for resolver in self.resolvers:
            try:
                identity = resolver()
            except Exception as error:
                report_problem("Asking a framework who makes a call", error)
                continue
            if identity is not None and identity.agent is not None:
                return identity
            unnamed = unnamed or identity
        return unnamed


def header_value(text: str) -> str:
    """Text as the value of a header; other characters than ASCII are percent-encoded (`urllib.parse.unquote`).

    >>> header_value("write_query"), header_value("Übersetzer")
    ('write_query', '%C3%9Cbersetzer')
    """
    return quote(text, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~", errors="replace").strip()[:_MAX_HEADER]


def goes_to_the_server(url: str) -> bool:
    """True if the URL is below the server's of this context's attempt; a call to another model API is reported."""
    active = current_attempt()
    if active is None:
        return False
    try:
        if _is_below(url, active.base_url):
            return True
        if MODEL_CALL.search(address := _address(url)):
            active.recording.bypassed(address)
        return False
    except ValueError as error:
        report_problem("Reading the URL of a request", error)
        return False


def _is_below(url: str, base_url: str) -> bool:
    parts, base = urlsplit(url), urlsplit(base_url)
    hosts = {"127.0.0.1" if part.hostname == "localhost" else part.hostname for part in (parts, base)}
    return (
        parts.scheme == base.scheme
        and len(hosts) == 1
        and (parts.port or _DEFAULT_PORTS.get(parts.scheme)) == (base.port or _DEFAULT_PORTS.get(base.scheme))
        and (parts.path.startswith(f"{base.path.rstrip('/')}/") or parts.path == base.path)
    )


def _address(url: str) -> str:
    """A URL without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].removesuffix(f":{_DEFAULT_PORTS.get(parts.scheme)}")
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def _begun_step(method: str, headers: Mapping[str, str]) -> Step | None:
    """The step that a call begins, if its scope has steps; a retry stays in the step of its first try."""
    scope = current_scope()
    if scope is None or scope.steps is None or method != "POST":
        return None
    step, is_retry = HERE.get().step, headers.get(HEADER_RETRIES, "0") != "0"
    goes_on = is_retry and step is not None and step.steps is scope.steps
    return step if goes_on else scope.steps.begin(scope.identity.agent)


def _kept_call(request: Any) -> SentCall | None:
    """The call to keep with its reply; None if a server records it, or if it is no model call."""
    active = current_attempt()
    if active is None or active.calls is None:
        return None
    try:
        call = SentCall(_address(str(request.url)), request.content, dict(request.headers))
    except Exception as error:
        report_problem("Reading a request", error)
        return None
    if not MODEL_CALL.search(call.address):
        return None
    active.calls.append(call)
    return call


class _KeptBody:
    """The body of a reply as the client reads it; the call gets all of it at the end."""

    def __init__(self, response: Any, call: SentCall) -> None:
        self._response, self._body, self._call = response, response.stream, call
        self._parts: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for part in self._body:
            self._parts.append(part)
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            self._parts.append(part)
            yield part

    def close(self) -> None:
        self._body.close()
        self._end()

    async def aclose(self) -> None:
        await self._body.aclose()
        self._end()

    @guarded
    def _end(self) -> None:
        # A reply with the same headers decompresses it.
        whole = type(self._response)(200, headers=self._response.headers, content=b"".join(self._parts))
        self._call.end(whole.content)


def _httpx(library: ModuleType, stamper: Stamper, patches: Patches) -> None:
    kept_body = type("KeptBody", (_KeptBody, library.SyncByteStream, library.AsyncByteStream), {})

    @contextmanager
    def sending(_: Any, request: Any, *args: Any, **kwargs: Any) -> Iterator[SentCall | None]:
        before = _SENDING.set(str(request.url))
        try:
            if call := _kept_call(request):
                with stamper.stamped(request.method, call.headers):
                    yield call
                keep_reply(call)
            elif goes_to_the_server(str(request.url)):
                with stamper.stamped(request.method, request.headers):
                    yield None
            else:
                yield None
        finally:
            _SENDING.reset(before)

    @guarded
    def keep_reply(call: SentCall) -> None:
        response, call.result = call.result, None
        call.reply_headers = response.headers
        if response.status_code == 200 and response.is_closed:
            call.end(response.content)
        elif response.status_code == 200:
            response.stream = kept_body(response, call)

    for client in (library.Client, library.AsyncClient):
        patches.replace(client, "send", within(sending))
    _poll_when_used(import_module(library.__name__.replace("httpx", "httpcore")), patches)


def _poll_when_used(pools: ModuleType, patches: Patches) -> None:
    """Have a pool ask the system about the one connection that it is about to use, and not about every idle one.

    To poll all of them at the start and the end of each request took 44% of a worker's thread. If the server has closed
    the connection, the pool chooses again, as if another request had taken it.
    """

    def too_old(_: _Send) -> _Send:
        return lambda connection: (end := connection._expire_at) is not None and time.monotonic() > end

    def usable(has_expired: _Send) -> Callable[[_Send], _Send]:
        def checking(handle: _Send) -> _Send:
            def handle_if_usable(connection: Any, request: Any) -> Any:
                if has_expired(connection):
                    connection._expire_at = 0.0  # The pool closes it.
                    raise pools.ConnectionNotAvailable
                return handle(connection, request)

            return handle_if_usable

        return checking

    blocking, non_blocking = pools.HTTP11Connection, pools.AsyncHTTP11Connection
    for kind, name in ((blocking, "handle_request"), (non_blocking, "handle_async_request")):
        patches.replace(kind, name, usable(kind.has_expired))
        patches.replace(kind, "has_expired", too_old)


def _urllib3(library: ModuleType, stamper: Stamper, patches: Patches) -> None:
    def stamping_urlopen(urlopen: _Send) -> _Send:
        def stamped_urlopen(
            pool: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            address = f"{pool.scheme}://{pool.host}:{pool.port or ''}{url}" if url.startswith("/") else url
            headers_to_send = _headers_to_stamp(address, pool.headers if headers is None else headers)
            if headers_to_send is None:
                return urlopen(pool, method, url, body, headers, *args, **kwargs)
            with stamper.stamped(method, headers_to_send):
                return urlopen(pool, method, url, body, headers_to_send, *args, **kwargs)

        return stamped_urlopen

    patches.replace(library.HTTPConnectionPool, "urlopen", stamping_urlopen)


def _aiohttp(library: ModuleType, stamper: Stamper, patches: Patches) -> None:
    def stamping_request(request: _Send) -> _Send:
        async def stamped_request(session: Any, method: str, url: Any, **options: Any) -> Any:
            address = str(session._build_url(url))
            headers_to_send = _headers_to_stamp(address, [*session.headers.items(), *_pairs(options.get("headers"))])
            if headers_to_send is None:
                return await request(session, method, url, **options)
            with stamper.stamped(method, headers_to_send):
                return await request(session, method, url, **{**options, "headers": headers_to_send})

        return stamped_request

    patches.replace(library.ClientSession, "_request", stamping_request)


def _headers_to_stamp(url: str, headers: Any) -> dict[str, str] | None:
    """The headers of a request to the server, by names in lower case; None for any other, and one that is stamped."""
    try:
        if url == _SENDING.get() or not goes_to_the_server(url):
            return None
        by_name = {_text(name).lower(): _text(value) for name, value in _pairs(headers)}
    except Exception as error:
        report_problem("Reading a request", error)
        return None
    return None if HEADER_ROLLOUT in by_name else by_name


def _pairs(headers: Any) -> Iterable[tuple[Any, Any]]:
    return headers.items() if hasattr(headers, "items") else headers or ()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


HTTP_LIBRARIES: Mapping[str, Callable[[ModuleType, Stamper, Patches], None]] = {
    "httpx": _httpx,  # openai 1.x, 2.x and anthropic use it, openai 3.x the next one
    "httpx2": _httpx,
    "urllib3.connectionpool": _urllib3,  # `requests` sends through it
    "aiohttp.client": _aiohttp,
}
"""The modules that send requests, with the function that patches each; doing it again changes nothing."""
