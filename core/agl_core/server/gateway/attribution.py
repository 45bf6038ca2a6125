"""Which attempt an agent's request belongs to: its key says so, and its path or a header may."""

from __future__ import annotations

from starlette.requests import Request

from agl_core.server.attempt import ActiveAttempt, attempt_key
from agl_core.server.errors import ApiError, attempt_closed
from agl_core.server.keys import Keys
from agl_core.server.queue import RolloutQueue
from agl_core.server.source import RolloutSource
from agl_core.types import AttemptKey
from agl_core.wire.headers import HEADER_ROLLOUT


def attempt_of(request: Request, keys: Keys, queue: RolloutQueue) -> ActiveAttempt:
    """The attempt that the request's path or header names, else the running one whose key it carries.

    ApiError 401 without that attempt's key, whatever else is wrong. ApiError 400 if path and header differ, 404 if
    there is no such attempt.
    """
    place, header = request.path_params, request.headers.get(HEADER_ROLLOUT)
    path = f"{place['rollout']}/{place['attempt']}" if "rollout" in place else None
    name = header if path is None else path
    if name is None:
        key = keys.holder(request, queue.held())
    else:
        rollout, _, number = name.rpartition("/")
        named = attempt_key(rollout, number)
        key = keys.holder(request, [] if named is None else [named])
    if header not in (None, name):
        raise ApiError(
            400,
            f"The path says {path}, but the header {HEADER_ROLLOUT} says {header!r}. Send one of them, or the same in "
            f"both.",
            code="rollout_mismatch",
        )
    attempt = queue.attempt(key)
    if attempt is None:
        raise ApiError(
            404,
            f"There is no attempt {key.attempt} of rollout {key.rollout!r} on this server. A request needs the rollout "
            f"and attempt of a lease that is held now; an old base URL does not do.",
            code="rollout_unknown",
        )
    return attempt


class Attribution:
    """Whose model calls are whose: of running attempts, and of those that a source opens."""

    def __init__(self, keys: Keys, queue: RolloutQueue, source: RolloutSource | None) -> None:
        self._keys, self._queue, self._source = keys, queue, source

    async def of(self, request: Request) -> ActiveAttempt:
        """The attempt that a request belongs to, open or not. ApiError as of `attempt_of`, and of the source."""
        opened = None if self._source is None else await self._source.attempt_of(request)
        return attempt_of(request, self._keys, self._queue) if opened is None else opened

    async def open(self, request: Request) -> ActiveAttempt:
        """The same; ApiError 410 if it is closed and takes no calls then."""
        found = await self.of(request)
        if found.closed and found.refuses_late:
            raise attempt_closed(*found.key)
        return found


def attempt_in_path(request: Request) -> AttemptKey | None:
    """The attempt that the request's path names; None if it names none."""
    place = request.path_params
    return attempt_key(place["rollout"], place["attempt"]) if "rollout" in place else None
