"""Headers that say who calls, and for which attempt, on requests of httpx and httpx2 to the Lightning Server.

A client made once at import may be shared by concurrent rollouts: each request carries the attempt of the context
that sends it. Requests to any other host are left alone.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from agl_core.capture.attach.methods import Patches
from agl_core.capture.context import ActiveAttempt, Step, current_attempt, current_identity, current_scope, current_step
from agl_core.capture.reports import report_problem
from agl_core.capture.state import packed_variables
from agl_core.types import Identity
from agl_core.wire.headers import HEADER_AGENT, HEADER_PARENT_SPAN, HEADER_RETRY, HEADER_ROLLOUT, HEADER_STATE

HTTP_LIBRARIES = ("httpx", "httpx2")
"""openai 1.x, 2.x and anthropic use the first, openai 3.x the second."""

Resolver: TypeAlias = Callable[[], Identity | None]
"""Asks a framework who makes the request that is being sent; None if it does not know."""

_RETRY_COUNT = "x-stainless-retry-count"
"""How the clients of OpenAI and Anthropic number the retries of a request, 0 first."""
_MAX_HEADER = 512
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class _Sent:
    """The latest first try of this context."""

    marker: str
    digest: bytes


_sent: ContextVar[_Sent | None] = ContextVar("agl_sent", default=None)


class Stamping:
    """Stamps what `Client.send` and `AsyncClient.send` of an HTTP library send."""

    def __init__(self) -> None:
        self.resolvers: list[Resolver] = []
        """Asked where no adapter has entered an identity; in this order, the first answer counts."""

    def install(self, library: ModuleType, patches: Patches) -> None:
        """Patch an HTTP library; doing it again changes nothing."""
        patches.replace(library.Client, "send", self._stamping)
        patches.replace(library.AsyncClient, "send", self._stamping_async)

    def _stamping(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def stamped_send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            with self._stamped(request):
                return send(client, request, *args, **kwargs)

        return stamped_send

    def _stamping_async(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def stamped_async_send(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            with self._stamped(request):
                return await send(client, request, *args, **kwargs)

        return stamped_async_send

    @contextmanager
    def _stamped(self, request: Any) -> Iterator[None]:
        step = self._stamp(request)
        try:
            yield
        finally:
            if step is not None:
                step.end_call()

    def _stamp(self, request: Any) -> Step | None:
        """Stamp a request that goes to the server; returns the step that it begins, if it begins one."""
        active = current_attempt()
        step = None
        if active is None:
            return None
        try:
            if _is_below(request.url, active.base_url):
                step = _begun_step(request)
                request.headers.update(self._headers(request, active, step))
                _authorize(request, active)
        except Exception as error:
            report_problem("Stamping a request", error)
        return step

    def _headers(self, request: Any, active: ActiveAttempt, step: Step | None) -> dict[str, str]:
        who = current_identity() or Identity()
        if who.agent is None and who.parent_span is None:
            who = self._resolved() or who
        headers = {
            HEADER_ROLLOUT: f"{active.rollout}/{active.attempt}",
            HEADER_AGENT: who.agent,
            HEADER_PARENT_SPAN: who.parent_span or (step and step.span),
            HEADER_RETRY: _retry_marker(request),
        }
        stamped = {name: header_value(value) for name, value in headers.items() if value}
        variables = packed_variables()
        return {**stamped, HEADER_STATE: variables} if variables else stamped

    def _resolved(self) -> Identity | None:
        """The first answer that names an agent, else the first answer."""
        answered: Identity | None = None
        for resolver in self.resolvers:
            try:
                identity = resolver()
            except Exception as error:
                report_problem("Asking a framework who makes a call", error)
                continue
            if identity is not None and identity.agent is not None:
                return identity
            answered = answered or identity
        return answered


def header_value(text: str) -> str:
    """Text as the value of a header; other characters than ASCII are percent-encoded (`urllib.parse.unquote`).

    >>> header_value("write_query"), header_value("Übersetzer")
    ('write_query', '%C3%9Cbersetzer')
    """
    return quote(text, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~").strip()[:_MAX_HEADER]


def _is_below(url: Any, base_url: str) -> bool:
    base = urlsplit(base_url)
    return (
        url.scheme == base.scheme
        and url.host == base.hostname
        and (url.port or _DEFAULT_PORTS.get(url.scheme)) == (base.port or _DEFAULT_PORTS.get(base.scheme))
        and (url.path.startswith(f"{base.path.rstrip('/')}/") or url.path == base.path)
    )


def _authorize(request: Any, active: ActiveAttempt) -> None:
    """Send the attempt's own key, whatever key the client has: one client may serve many attempts."""
    if "x-api-key" in request.headers:
        request.headers["x-api-key"] = active.api_key
    request.headers["authorization"] = f"Bearer {active.api_key}"


def _begun_step(request: Any) -> Step | None:
    """The step that a call begins, if its scope has steps; a retry stays in the step of its first try."""
    scope = current_scope()
    if scope is None or scope.steps is None or request.method != "POST":
        return None
    step = current_step()
    is_retry = request.headers.get(_RETRY_COUNT, "0") != "0"
    return step if is_retry and step is not None and step.steps is scope.steps else scope.steps.begin()


def _retry_marker(request: Any) -> str | None:
    """One value for a request and its retries, if the client numbers them; None if it cannot be known.

    A client retries in the context of its first try, with the same body; nothing else counts as a retry.
    """
    count = request.headers.get(_RETRY_COUNT)
    if count is None:
        return None
    try:
        body = request.content
    except RuntimeError:  # the body is a stream, which can be read only once
        return None
    digest = hashlib.blake2b(body, digest_size=16).digest()
    if count == "0":
        sent = _Sent(uuid.uuid4().hex, digest)
        _sent.set(sent)
        return sent.marker
    first = _sent.get()
    return first.marker if first is not None and first.digest == digest else None
