"""Which attempt a request is of: named by its path, or by a header."""

from __future__ import annotations

from starlette.requests import Request

from agl_core.server.attempts import ActiveAttempt, attempt_key
from agl_core.server.faults import ApiError
from agl_core.server.keys import Keys
from agl_core.server.queue import RolloutQueue
from agl_core.types import AttemptKey
from agl_core.wire import HEADER_ROLLOUT


def named_attempt(request: Request, keys: Keys, queue: RolloutQueue) -> ActiveAttempt | None:
    """The attempt that the request's path or header names; None if neither does, and no key was looked at.

    ApiError 401 without that attempt's key: what else is wrong is told to those who have it only. ApiError 400 if path
    and header differ, 404 if there is no such attempt.
    """
    place, header = request.path_params, request.headers.get(HEADER_ROLLOUT)
    path = f"{place['rollout']}/{place['attempt']}" if "rollout" in place else None
    told = header if path is None else path
    if told is None:
        return None
    key = told_key(told)
    keys.check_agent(request, key)
    if header not in (None, told):
        raise ApiError(
            400,
            f"The path says {path}, but the header {HEADER_ROLLOUT} says {header!r}. Send one of them, or the same in "
            f"both.",
            code="rollout_mismatch",
        )
    attempt = None if key is None else queue.attempt(key)
    if attempt is None:
        rollout, _, number = told.rpartition("/")
        raise ApiError(
            404,
            f"There is no attempt {number!r} of rollout {rollout!r} on this server. A request needs the rollout and "
            f"attempt of a lease that is held now; an old base URL or another run's server does not do.",
            code="rollout_unknown",
        )
    return attempt


def told_key(told: str) -> AttemptKey | None:
    """The key that `ROLLOUT/ATTEMPT` says; None if it says none."""
    rollout, _, number = told.rpartition("/")
    return attempt_key(rollout, number)
