"""What workers report of attempts that have ended already: it is recorded, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

from agl_core.server.errors import ApiError
from agl_core.server.rollouts.attempt import reported
from agl_core.store.interface import Store
from agl_core.types import Attempt, AttemptKey, Ending
from agl_core.wire.workers import CloseReply, CloseRequest

_LATE = "Its worker reported later that it was"


class LateReports:
    """Records them in this store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def answer(self, key: AttemptKey, request: CloseRequest) -> CloseReply:
        """The answer for an attempt that is not in memory: one that ended long ago, or before a restart.

        ApiError 404 if there is no such attempt.
        """
        ended = [each for each in await self._store.attempts(key.rollout) if each.key == key and each.ending]
        if not ended:
            raise ApiError(
                404,
                f"There is no attempt {key.attempt} of rollout {key.rollout} here. Only attempts that were leased "
                f"from this server can be closed; check the server's address and the ids.",
                code="attempt_unknown",
            )
        rollout = await self._store.rollout(key.rollout)
        counted = rollout.counted_attempt == key.attempt
        if not counted:
            await self.record(ended[0], request)
        return CloseReply(counted=counted)

    async def record(self, record: Attempt, request: CloseRequest) -> Attempt:
        """The record of a lost and superseded attempt, with its worker's late report; it keeps its ending.

        Only the first such report is kept; the same record comes back if there is nothing to add.
        """
        error = record.error or ""
        if record.ending is not Ending.LOST or request.ending is Ending.LOST or _LATE in error:
            return record
        error = f"{error} {_LATE} {request.ending}; that does not count.".lstrip()
        late = replace(record, result=request.result, error=error)
        await self._store.put(*reported(record.key, request), late)
        return late
