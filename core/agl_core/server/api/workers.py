"""The routes of workers: leases, heartbeats, and how attempts ended."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.routing import Route

from agl_core.server.api.routes import route, route_of
from agl_core.server.gateway.attribution import attempt_in_path
from agl_core.server.keys import Keys
from agl_core.server.rollouts.queue import RolloutQueue
from agl_core.types import AttemptKey
from agl_core.wire.body import Empty
from agl_core.wire.operation import Right
from agl_core.wire.workers import (
    ACTIVITY,
    CLOSE,
    HEALTH,
    HEARTBEAT,
    LEASE,
    Activity,
    Health,
    HeartbeatReply,
    HeartbeatRequest,
)


def worker_routes(
    keys: Keys, queue: RolloutQueue, health: Callable[[], Health], activity: Callable[[], Activity]
) -> list[Route]:
    """The routes of workers; `health` says what the server is doing, `activity` what its rollouts wait for."""

    async def beat(body: HeartbeatRequest) -> HeartbeatReply:
        return queue.heartbeat(body)

    async def look(body: Empty) -> Health:
        return health()

    async def watch(body: Empty) -> Activity:
        return activity()

    def leased(request: Request) -> AttemptKey:
        attempt = attempt_in_path(request)
        keys.check(request, Right.LEASE, attempt)
        assert attempt is not None, "its key was checked"
        return attempt

    return [
        route(LEASE, keys, queue.lease),
        route(HEARTBEAT, keys, beat),
        route_of(CLOSE, leased, queue.close_attempt),
        route(HEALTH, keys, look),
        route(ACTIVITY, keys, watch),
    ]
