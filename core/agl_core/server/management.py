"""What workers ask of the server: leases, and how attempts ended."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from agl_core.server.attempts import attempt_key
from agl_core.server.faults import ApiError
from agl_core.server.operations import NoBody, Operations, Right, operation, while_connected
from agl_core.server.queue import RolloutQueue
from agl_core.wire import (
    CloseReply,
    CloseRequest,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseReply,
    LeaseRequest,
)

_NO_SUCH = {404: "There is no such attempt."}


class Management:
    """The workers' routes. `health` tells what the server is doing."""

    def __init__(self, queue: RolloutQueue, health: Callable[[], Health]) -> None:
        self._queue, self._told = queue, health

    @property
    def operations(self) -> Operations:
        """What is served."""
        worker = Right.WORKER
        closing = "/rollouts/{rollout}/attempts/{attempt}/close"
        return (
            operation("POST", "/leases", worker, LeaseRequest, LeaseReply, self._lease),
            operation("POST", "/heartbeats", worker, HeartbeatRequest, HeartbeatReply, self._heartbeat),
            operation("POST", closing, worker, CloseRequest, CloseReply, self._close, _NO_SUCH),
            operation("GET", "/health", Right.EITHER, NoBody, Health, self._health),
        )

    async def _lease(self, request: Request, body: LeaseRequest) -> LeaseReply:
        """Lend rollouts to a worker; waits for the first one."""
        return await while_connected(request, self._queue.lease(body))

    async def _heartbeat(self, request: Request, body: HeartbeatRequest) -> HeartbeatReply:
        """A worker lives: extend the leases of the attempts that it names."""
        return self._queue.heartbeat(body)

    async def _close(self, request: Request, body: CloseRequest) -> CloseReply:
        """End an attempt."""
        rollout, number = request.path_params["rollout"], request.path_params["attempt"]
        key = attempt_key(rollout, number)
        if key is None:
            raise ApiError(404, f"There is no attempt {number!r} of rollout {rollout!r}.", code="attempt_unknown")
        return await self._queue.close_attempt(key, body)

    async def _health(self, request: Request, body: NoBody) -> Health:
        """What the server is doing."""
        return self._told()
