"""Making a session: a new one, or one that the store has."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agl_core.errors import StoreRefusedError
from agl_core.server.rollouts.attempt import AttemptState
from agl_core.server.sessions.session import RECORDED, UNRECORDED_CALLS, ActiveSession, Recorder
from agl_core.store.interface import SessionStore
from agl_core.types import Attempt, Mode, Rollout, RolloutState, Task

USE_SPLIT = "use"
"""The split of the tasks of sessions."""


@dataclass(frozen=True)
class SessionMaker:
    """Makes the sessions of a run."""

    store: SessionStore
    run: str
    recorder: Recorder
    end: Callable[[ActiveSession, str], Awaitable[None]]
    """See `ActiveSession.end`."""

    def new(self, id: str, application: str, name: str | None) -> ActiveSession:
        now = time.time()
        place = id.split("-")[1]
        task = Task(place, None, USE_SPLIT, {"application": application, "session": name})
        rollout = Rollout(id, self.run, 0, place, task, Mode.USE, 0, 0, RolloutState.RUNNING)
        return self._active(rollout, Attempt(id, 0, application, started=now), recorded=id.startswith(RECORDED))

    async def stored(self, id: str) -> Rollout | None:
        """The session of this id, as the store has it."""
        try:
            rollout = await self.store.rollout(id)
        except StoreRefusedError:
            return None
        return rollout if rollout.id == id and rollout.mode is Mode.USE else None

    async def recalled(self, rollout: Rollout) -> ActiveSession | None:
        """A session of the store with what its calls left behind, to go on with; None if it has none."""
        attempts = await self.store.attempts(rollout.id)
        if not attempts:
            return None
        calls = await self.store.calls([attempts[0].key])
        session = self._active(rollout, attempts[0], begun=True)
        session.used = max([attempts[0].started, *(call.ended for call in calls)])
        session.answered.recall(calls)
        session.started_calls = max((call.sequence + 1 for call in calls), default=0)
        session.completed_calls = sum(not call.late for call in calls)
        session.versions = {call.policy: call.version for call in calls if call.version is not None}
        session.missed = (attempts[0].result or {}).get(UNRECORDED_CALLS, 0)
        if rollout.state is RolloutState.DONE:
            session.move(AttemptState.CLOSING)
            session.move(AttemptState.COUNTED)
        return session

    def _active(self, rollout: Rollout, record: Attempt, **known: Any) -> ActiveSession:
        return ActiveSession(
            rollout,
            record,
            deadline=float("inf"),
            application=str(rollout.task.metadata.get("application")),
            recorder=self.recorder,
            end=self.end,
            used=record.started,
            **known,
        )
