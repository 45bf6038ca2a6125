"""How long workers may keep attempts: until their timeout at most, and no longer than their heartbeats last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from agl_core.server.keys import Keys
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.types import Attempt, AttemptKey, Ending, Rollout
from agl_core.wire.headers import rollout_path
from agl_core.wire.workers import AttemptRef, HeartbeatRequest, Lease

_TAKEN_AWAY = frozenset({Ending.LOST, Ending.CANCELLED})


class Leases:
    """Lends attempts.

    An attempt that is not closed counts as lost `grace` seconds after its `timeout`. A worker that sends heartbeats,
    every `heartbeat` seconds, loses what it holds `lease` seconds after the last one that named it; a worker that
    never sent one keeps it up to that timeout.
    """

    def __init__(self, *, timeout: float, grace: float, heartbeat: float, lease: float, keys: Keys) -> None:
        self._timeout, self._longest = timeout, timeout + grace
        self._heartbeat, self._expiry, self._keys = heartbeat, lease, keys
        self._beating: set[str] = set()
        """Workers that have sent a heartbeat."""

    def start(self, rollout: Rollout, record: Attempt) -> ActiveAttempt:
        expires = _now() + self._expiry if record.worker in self._beating else None
        return ActiveAttempt(rollout, record, _now() + self._longest, expires)

    def lent(self, active: ActiveAttempt) -> Lease:
        """The attempt as its worker gets it."""
        task = active.rollout.task
        return Lease(
            rollout=active.rollout.id,
            attempt=active.record.attempt,
            task_id=task.id,
            task_input=task.input,
            task_split=task.split,
            mode=active.mode,
            path=rollout_path(*active.key),
            key=self._keys.of_attempt(active.key),
            secret=self._keys.of_lease(active.key),
            timeout=self._timeout,
            heartbeat=self._heartbeat,
            expires=self._expiry,
        )

    def beat(
        self,
        request: HeartbeatRequest,
        known: Mapping[AttemptKey, ActiveAttempt],
        running: Iterable[ActiveAttempt],
    ) -> list[AttemptRef]:
        """Extend the leases of the attempts that a heartbeat names; those that its worker does not hold come back.

        A worker's first heartbeat starts the clock of all that it holds.
        """
        expires = _now() + self._expiry
        if request.worker not in self._beating:
            self._beating.add(request.worker)
            for each in running:
                if each.record.worker == request.worker:
                    each.expires = expires
        lost: list[AttemptRef] = []
        for named in request.attempts:
            key = AttemptKey(named.rollout, named.attempt)
            active = known.get(key)
            if active is None or not self._keys.holds(named.secret, key) or active.record.ending in _TAKEN_AWAY:
                lost.append(AttemptRef(rollout=key.rollout, attempt=key.attempt))
            else:
                active.expires = expires
        return lost

    def next_look(self, running: Iterable[ActiveAttempt]) -> float:
        """Event loop time before which no lease can expire, those made or extended from now on included."""
        return min([_now() + min(self._expiry, self._longest), *(each.due for each in running)])

    def why_lost(self, active: ActiveAttempt) -> str | None:
        """Why the attempt counts as lost; None if it does not."""
        now, worker = _now(), active.record.worker
        if active.deadline <= now:
            return f"The worker {worker} did not report within {self._longest:g} seconds."
        if active.due <= now:
            return f"The worker {worker} sent no heartbeat for {self._expiry:g} seconds."
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
