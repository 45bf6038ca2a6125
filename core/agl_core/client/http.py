"""The typed HTTP clients of a Lightning Server: one for async code, one for blocking code.

`ask` sends any operation of `agl_core.wire.workers` and `agl_core.wire.online` whose path names no attempt.
A worker's key allows `LEASE` and `HEARTBEAT`, an operator's key `ACTIVITY`, and both allow `health`. `close_attempt`
sends the secret of the lease.

Every method raises UnreachableError if the server did not answer or failed: the same request may succeed later. It
raises RefusedError if the server refused the request, and will again; ConfigError if a request cannot carry the key.
All requests may be repeated: the same request counts once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agl_core.errors import ConfigError, ServerError
from agl_core.wire.body import Empty, ErrorReply
from agl_core.wire.keys import problem_of_key
from agl_core.wire.operation import Answer, Asked, Operation
from agl_core.wire.workers import CLOSE, HEALTH, CloseReply, CloseRequest, Health, Lease

P = ParamSpec("P")
Result = TypeVar("Result")

_TIMEOUT = httpx.Timeout(30, read=90)


class UnreachableError(ServerError):
    """The server did not answer, or cannot handle the request now: the same request may succeed later."""


class FailingError(UnreachableError):
    """The server answered that it cannot handle this request now: others may succeed meanwhile."""


class RefusedError(ServerError):
    """The server refused: a key, a body or an id is wrong."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Requests(ABC):
    """The requests of both clients; each sends them in its own way."""

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key

    async def ask(self, operation: Operation[Asked, Answer], body: Asked) -> Answer:
        """What the server replies to one request."""
        return await self._ask(operation, operation.path, body)

    async def health(self) -> Health:
        return await self.ask(HEALTH, Empty())

    async def close_attempt(self, lease: Lease, request: CloseRequest) -> CloseReply:
        """Say how an attempt ended; sending it again changes nothing."""
        path = CLOSE.path.format(rollout=lease.rollout, attempt=lease.attempt)
        return await self._ask(CLOSE, path, request, _headers(lease.secret))

    @abstractmethod
    async def _send(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str] | None
    ) -> httpx.Response: ...

    async def _ask(
        self, operation: Operation[Any, Answer], path: str, body: BaseModel, headers: dict[str, str] | None = None
    ) -> Answer:
        content = self._content(operation, body) if operation.has_body else None
        try:
            response = await self._send(operation.method, path, content, headers)
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"The Lightning Server at {self.base_url} cannot be reached ({type(error).__name__}: {error}). "
                f"Is it running, and is the address right?"
            ) from error
        return _answered(response, operation.reply)

    def _content(self, operation: Operation[Any, Any], body: BaseModel) -> bytes:
        """The body as bytes. RefusedError if it is larger than the server reads: it would hang up meanwhile."""
        content, most = body.model_dump_json().encode(), operation.largest
        if len(content) > most:
            reason = f"The request body has {len(content)} bytes; {most} ({most >> 20} MiB) are the limit."
            raise RefusedError(f"{self.base_url}{operation.path}: {reason}", 413, reason)
        return content


class LightningClient(_Requests):
    """What workers and operators ask of a server; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str) -> None:
        super().__init__(base_url, key)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=_headers(key),
            timeout=_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str] | None
    ) -> httpx.Response:
        return await self._http.request(method, path, content=content, headers=headers)


class _BlockingRequests(_Requests):
    """Sends each request at once: its coroutines never wait."""

    def __init__(self, base_url: str, key: str, timeout: float | None) -> None:
        super().__init__(base_url, key)
        self.http = httpx.Client(
            base_url=base_url,
            headers=_headers(key),
            timeout=_TIMEOUT if timeout is None else timeout,
            trust_env=False,
        )

    async def _send(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str] | None
    ) -> httpx.Response:
        return self.http.request(method, path, content=content, headers=headers)


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[BlockingClient, P], Result]:
    """The blocking form of an async client's method."""

    @wraps(method)
    def blocking(client: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            method(client._requests, *args, **kwargs).send(None)
        except StopIteration as ended:
            result: Result = ended.value
            return result
        raise AssertionError("no request waits")

    return blocking


class BlockingClient:
    """The same for code without an event loop; one instance per thread.

    >>> def example():
    ...     with BlockingClient("http://127.0.0.1:8000", key="…") as client:
    ...         return client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str, timeout: float | None = None) -> None:
        self._requests = _BlockingRequests(base_url, key, timeout)

    ask = _blocking(_Requests.ask)
    health = _blocking(_Requests.health)
    close_attempt = _blocking(_Requests.close_attempt)

    def close(self) -> None:
        self._requests.http.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _answered(response: httpx.Response, reply: type[Answer]) -> Answer:
    if response.is_server_error:
        raise FailingError(f"{response.url} answered {response.status_code}: {_reason(response)}")
    if response.is_error:
        reason = _reason(response)
        raise RefusedError(f"{response.url} answered {response.status_code}: {reason}", response.status_code, reason)
    try:
        return reply.model_validate_json(response.content)
    except ValidationError as error:
        raise ServerError(f"{response.url} answered, but not as a Lightning Server of this version does.") from error


def _reason(response: httpx.Response) -> str:
    try:
        return ErrorReply.model_validate_json(response.content).error.message
    except ValidationError:
        return response.text[:500]
