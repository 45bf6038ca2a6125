"""The typed HTTP client of a Lightning Server."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agl_core.errors import ServerError
from agl_core.types import AttemptKey
from agl_core.wire import CloseReply, CloseRequest, LeaseReply, LeaseRequest

Reply = TypeVar("Reply", bound=BaseModel)


class UnreachableError(ServerError):
    """The server did not answer, or said that it cannot now: the same request may succeed later."""


class LightningClient:
    """What a worker asks of a server; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.lease(LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=authorized(key),
            timeout=httpx.Timeout(30, read=90),
            trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for rollouts; waits up to `request.wait` seconds for the first one."""
        return await self._post("/agl/v1/leases", request, LeaseReply)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """Say how an attempt ended; sending it again changes nothing."""
        return await self._post(f"/agl/v1/rollouts/{key.rollout}/attempts/{key.attempt}/close", request, CloseReply)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _post(self, path: str, body: BaseModel, reply: type[Reply]) -> Reply:
        try:
            response = await self._http.post(
                path, content=body.model_dump_json(), headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            raise unreachable(self.base_url, error) from error
        return answered(response, reply)


def authorized(key: str) -> dict[str, str]:
    """The headers that show the worker key."""
    return {"Authorization": f"Bearer {key}"}


def unreachable(base_url: str, error: Exception) -> UnreachableError:
    """The error for a request that got no answer."""
    return UnreachableError(
        f"The Lightning Server at {base_url} cannot be reached ({type(error).__name__}: {error}). "
        f"Is it running, and is the address right?"
    )


def answered(response: httpx.Response, reply: type[Reply]) -> Reply:
    """The body of an answer. UnreachableError if the server failed, ServerError if it refused."""
    if response.is_error:
        kind = UnreachableError if response.is_server_error else ServerError
        raise kind(f"{response.url} answered {response.status_code}: {response.text[:500]}")
    try:
        return reply.model_validate_json(response.content)
    except ValidationError as error:
        raise ServerError(f"{response.url} answered, but not as a Lightning Server of this version does.") from error
