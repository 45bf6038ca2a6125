"""The typed HTTP clients of a Lightning Server: one for async code, one for blocking code.

`ask` sends any `Operation` whose path names no attempt. A worker's key allows `LEASE` and `HEARTBEAT`, an operator's
key `ACTIVITY`, and both allow `health`. `close_attempt` sends the secret of the lease.

Every method raises UnreachableError if the server did not answer or failed: the same request may succeed later. It
raises RefusedError if the server refused the request, and will again; ConfigError if a request cannot carry the key.
All requests may be repeated: the same request counts once.
"""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from agl_core.errors import ConfigError, ServerError
from agl_core.wire.keys import problem_of_key
from agl_core.wire.operation import Answer, Asked, Empty, ErrorReply, Operation
from agl_core.wire.workers import CLOSE, HEALTH, CloseReply, CloseRequest, Health, Lease

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


class LightningClient:
    """What workers and operators ask of a server; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=_headers(key), timeout=_TIMEOUT, trust_env=False, limits=limits
        )

    async def ask(self, operation: Operation[Asked, Answer], body: Asked) -> Answer:
        """What the server replies to one request."""
        return await self._send(operation, _request(self.base_url, operation, body))

    async def health(self) -> Health:
        return await self.ask(HEALTH, Empty())

    async def close_attempt(self, lease: Lease, request: CloseRequest) -> CloseReply:
        """Say how an attempt ended; sending it again changes nothing."""
        return await self._send(CLOSE, _request(self.base_url, CLOSE, request, lease))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, operation: Operation[Any, Answer], request: dict[str, Any]) -> Answer:
        try:
            response = await self._http.request(**request)
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        return _answer(response, operation.reply)


class BlockingClient:
    """The same for code without an event loop; one instance per thread.

    >>> def example():
    ...     with BlockingClient("http://127.0.0.1:8000", key="…") as client:
    ...         return client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str, timeout: float | None = None) -> None:
        self.base_url = base_url
        self._http = httpx.Client(
            base_url=base_url, headers=_headers(key), timeout=timeout or _TIMEOUT, trust_env=False
        )

    def ask(self, operation: Operation[Asked, Answer], body: Asked) -> Answer:
        """What the server replies to one request."""
        try:
            response = self._http.request(**_request(self.base_url, operation, body))
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        return _answer(response, operation.reply)

    def health(self) -> Health:
        return self.ask(HEALTH, Empty())

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _request(
    base_url: str, operation: Operation[Any, Any], body: BaseModel, lease: Lease | None = None
) -> dict[str, Any]:
    """The request as httpx takes it. RefusedError if it is larger than the server reads: it would hang up meanwhile."""
    content = body.model_dump_json().encode() if operation.has_body else None
    if content is not None and len(content) > operation.largest:
        most = operation.largest
        reason = f"The request body has {len(content)} bytes; {most} ({most >> 20} MiB) are the limit."
        raise RefusedError(f"{base_url}{operation.path}: {reason}", 413, reason)
    path = operation.path if lease is None else operation.path.format(rollout=lease.rollout, attempt=lease.attempt)
    headers = None if lease is None else _headers(lease.secret)
    return {"method": operation.method, "url": path, "content": content, "headers": headers}


def _unreachable(base_url: str, error: httpx.HTTPError) -> UnreachableError:
    return UnreachableError(
        f"The Lightning Server at {base_url} cannot be reached ({type(error).__name__}: {error}). "
        f"Is it running, and is the address right?"
    )


def _answer(response: httpx.Response, reply: type[Answer]) -> Answer:
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
