"""The typed HTTP clients of a Lightning Server, for code that awaits and for code that blocks.

A worker's key is good for `lease`, `heartbeat` and `close_attempt`, an operator's for the rest, both for `health`.
Every method raises UnreachableError if the server did not answer or failed, and the same request may succeed later;
RefusedError if it said no, and will say so again. All of them may be repeated: what was said twice counts once.
ConfigError if a key is none that a request can carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from agl_core.client.parts import WRITE_PARTS, enqueuing, putting
from agl_core.errors import ConfigError, ServerError
from agl_core.store.interface import Record
from agl_core.store.packing import unpack
from agl_core.types import AttemptKey, Rollout
from agl_core.wire import (
    MAX_BODY,
    MAX_RECORDS,
    TAKE_RECORDS,
    CloseReply,
    CloseRequest,
    ErrorReply,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
)
from agl_core.wire.keys import problem_of_key
from agl_core.wire.operators import (
    Accepted,
    BeginReply,
    BeginRequest,
    CancelRequest,
    DoneRequest,
    FinishRequest,
    PackedRecords,
    Registration,
    StoreQuery,
    StoreQuestion,
    VersionsRequest,
)

Reply = TypeVar("Reply", bound=BaseModel)

_CONFLICT = 409
_TIMEOUT = httpx.Timeout(30, read=90)


class UnreachableError(ServerError):
    """The server did not answer, or said that it cannot now: the same request may succeed later."""


class RefusedError(ServerError):
    """The server said no: a key, a body or an id is wrong, or somebody else's turn has come."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class LightningClient:
    """What workers and operators ask of a server; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.lease(LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url, self.key = base_url, key
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=_headers(key),
            timeout=_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for rollouts; waits up to `request.wait` seconds for the first one."""
        return await self._ask("POST", "/leases", request, LeaseReply)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Say that attempts still run; returns those that no longer count."""
        return await self._ask("POST", "/heartbeats", request, HeartbeatReply)

    async def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """Say how an attempt ended; sending it again changes nothing."""
        return await self._ask("POST", _closing(key), request, CloseReply)

    async def health(self) -> Health:
        """What the server is doing."""
        return await self._ask("GET", "/health", None, Health)

    async def begin(self, request: BeginRequest) -> BeginReply:
        """Begin the run's next incarnation; what earlier ones left unfinished ends as lost."""
        return await self._ask("POST", "/runs", request, BeginReply)

    async def serve(self, registration: Registration) -> None:
        """Say where model calls go, and how they are sampled; again before it expires."""
        await self._ask("PUT", "/upstream", registration, Accepted)

    async def publish(self, request: VersionsRequest) -> None:
        """Say that policies were updated."""
        await self._ask("PUT", "/versions", request, Accepted)

    async def finish(self, request: FinishRequest) -> None:
        """Leave: rollouts wait for the next trainer, unless the run is over."""
        await self._ask("POST", "/runs/finish", request, Accepted)

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Have rollouts run; those that were added before are left alone. Many are sent in several requests."""
        for path, body in enqueuing(rollouts):
            await self._ask("POST", path, body, Accepted)

    async def done(self, ids: Sequence[str], wait: float = 0.0) -> list[Rollout]:
        """Those of `ids` that are done; waits up to so many seconds for the first one."""
        body = DoneRequest(ids=list(ids), wait=wait)
        return _rollouts(await self._ask("POST", "/rollouts/done", body, PackedRecords))

    async def cancel(self, ids: Sequence[str]) -> None:
        """End rollouts as cancelled."""
        await self._ask("POST", "/rollouts/cancel", CancelRequest(ids=list(ids)), Accepted)

    async def put(self, records: Iterable[Record]) -> None:
        """Write records, all or none, however many. StoreRefusedError names one that cannot be stored."""
        for path, body in putting(records):
            with _all_sent_again(path):
                await self._ask("POST", path, body, Accepted)

    async def query(self, question: StoreQuestion) -> list[Record]:
        """Read records."""
        return unpack(await self._ask("POST", "/store/query", StoreQuery(question), PackedRecords))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: str, path: str, body: BaseModel | None, reply: type[Reply]) -> Reply:
        path = f"/agl/v1{path}"
        content = _content(self.base_url, path, body)
        try:
            response = await self._http.request(method, path, content=content)
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        return _answered(response, reply)


class BlockingClient:
    """The same for code without an event loop; one instance per thread.

    >>> def example():
    ...     with BlockingClient("http://127.0.0.1:8000", key="…") as client:
    ...         return client.lease(LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str, timeout: float | None = None) -> None:
        self.base_url, self.key = base_url, key
        self._http = httpx.Client(
            base_url=base_url,
            headers=_headers(key),
            timeout=_TIMEOUT if timeout is None else timeout,
            trust_env=False,
        )

    def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for rollouts; waits up to `request.wait` seconds for the first one."""
        return self._ask("POST", "/leases", request, LeaseReply)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Say that attempts still run; returns those that no longer count."""
        return self._ask("POST", "/heartbeats", request, HeartbeatReply)

    def close_attempt(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """Say how an attempt ended; sending it again changes nothing."""
        return self._ask("POST", _closing(key), request, CloseReply)

    def health(self) -> Health:
        """What the server is doing."""
        return self._ask("GET", "/health", None, Health)

    def begin(self, request: BeginRequest) -> BeginReply:
        """Begin the run's next incarnation; what earlier ones left unfinished ends as lost."""
        return self._ask("POST", "/runs", request, BeginReply)

    def serve(self, registration: Registration) -> None:
        """Say where model calls go, and how they are sampled; again before it expires."""
        self._ask("PUT", "/upstream", registration, Accepted)

    def publish(self, request: VersionsRequest) -> None:
        """Say that policies were updated."""
        self._ask("PUT", "/versions", request, Accepted)

    def finish(self, request: FinishRequest) -> None:
        """Leave: rollouts wait for the next trainer, unless the run is over."""
        self._ask("POST", "/runs/finish", request, Accepted)

    def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Have rollouts run; those that were added before are left alone. Many are sent in several requests."""
        for path, body in enqueuing(rollouts):
            self._ask("POST", path, body, Accepted)

    def done(self, ids: Sequence[str], wait: float = 0.0) -> list[Rollout]:
        """Those of `ids` that are done; waits up to so many seconds for the first one."""
        body = DoneRequest(ids=list(ids), wait=wait)
        return _rollouts(self._ask("POST", "/rollouts/done", body, PackedRecords))

    def cancel(self, ids: Sequence[str]) -> None:
        """End rollouts as cancelled."""
        self._ask("POST", "/rollouts/cancel", CancelRequest(ids=list(ids)), Accepted)

    def put(self, records: Iterable[Record]) -> None:
        """Write records, all or none, however many. StoreRefusedError names one that cannot be stored."""
        for path, body in putting(records):
            with _all_sent_again(path):
                self._ask("POST", path, body, Accepted)

    def query(self, question: StoreQuestion) -> list[Record]:
        """Read records."""
        return unpack(self._ask("POST", "/store/query", StoreQuery(question), PackedRecords))

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: BaseModel | None, reply: type[Reply]) -> Reply:
        path = f"/agl/v1{path}"
        content = _content(self.base_url, path, body)
        try:
            response = self._http.request(method, path, content=content)
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        return _answered(response, reply)


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _content(base_url: str, path: str, body: BaseModel | None) -> bytes | None:
    """The body as bytes; RefusedError if they are more than the server reads, which would hang up while they come."""
    if body is None:
        return None
    content, most = body.model_dump_json().encode(), MAX_RECORDS if path in TAKE_RECORDS else MAX_BODY
    if len(content) > most:
        reason = f"The request body has {len(content)} bytes; {most} ({most >> 20} MiB) are the limit."
        raise RefusedError(f"{base_url}{path}: {reason}", 413, reason)
    return content


@contextmanager
def _all_sent_again(path: str) -> Iterator[None]:
    """UnreachableError if records came in parts and some are gone, with an earlier server: that may be repeated."""
    try:
        yield
    except RefusedError as error:
        if path == WRITE_PARTS and error.status == _CONFLICT:
            raise UnreachableError(str(error)) from error
        raise


def _closing(key: AttemptKey) -> str:
    return f"/rollouts/{key.rollout}/attempts/{key.attempt}/close"


def _rollouts(packed: PackedRecords) -> list[Rollout]:
    return [record for record in unpack(packed) if isinstance(record, Rollout)]


def _unreachable(base_url: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"The Lightning Server at {base_url} cannot be reached ({type(error).__name__}: {error}). "
        f"Is it running, and is the address right?"
    )


def _answered(response: httpx.Response, reply: type[Reply]) -> Reply:
    if response.is_server_error:
        raise UnreachableError(f"{response.url} answered {response.status_code}: {_reason(response)}")
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
