"""Leases of a queue, for its tests."""

from __future__ import annotations

from agl_core.server import RolloutQueue
from agl_core.types import AttemptKey, Ending
from agl_core.wire.workers import CloseRequest, LeaseReply, LeaseRequest

FINISHED, CRASHED = CloseRequest(ending=Ending.FINISHED, result="4"), CloseRequest(ending=Ending.CRASHED, error="Boom")
LOST = CloseRequest(ending=Ending.LOST)


async def lease(queue: RolloutQueue, capacity: int = 1, wait: float = 0) -> LeaseReply:
    return await queue.lease(LeaseRequest(worker="w", capacity=capacity, wait=wait))


async def leased(queue: RolloutQueue, *, calls: int = 0, overflows: int = 0) -> AttemptKey:
    """Lease one and let it have made some calls."""
    (one,) = (await lease(queue)).leases
    key = AttemptKey(one.rollout, one.attempt)
    attempt = queue.attempt(key)
    assert attempt is not None
    attempt.started_calls, attempt.completed_calls, attempt.context_overflows = calls + overflows, calls, overflows
    return key
