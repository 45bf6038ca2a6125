"""One session as the gateway has it, and how its calls are recorded without ever holding up its use."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.server.attempt import ActiveAttempt, AttemptState
from agl_core.server.errors import ApiError
from agl_core.server.upstream import Answering
from agl_core.store.interface import ErasableStore, Record, Store
from agl_core.types import Attempt, Call, Mode, Rollout, RolloutState, Task, ToolResult
from agl_online.redaction import Redaction
from agl_online.wire import HEADER_SESSION, SESSION_NAME

logger = logging.getLogger(__name__)

RECORDED, UNRECORDED = "use", "off"
"""What the ids of sessions begin with: those that are stored, and those that are not."""
SESSION_ID = re.compile(rf"({RECORDED}|{UNRECORDED})-([0-9a-f]{{24}})-([0-9a-f]{{12}})")
UNRECORDED_CALLS = "unrecorded"
"""In the result of a session's attempt: how many of its calls were answered and not recorded."""
USE_SPLIT = "use"
"""The split of the tasks of sessions."""
_PATIENCE = 2.0
"""Seconds that a reply waits for its call to be written."""
LONGEST_WAIT = 5.0
"""Seconds in which what is written of a session should be in the store."""
_WAITING = 256
"""Calls that may wait to be written; further ones are not recorded."""


@dataclass(slots=True)
class SessionCounters:
    """What happened to sessions since the server's start."""

    begun: int = 0
    ended: int = 0
    deleted: int = 0
    """Sessions that were deleted, opted out while they ran, or kept for as long as they may be."""
    unrecorded: int = 0
    """Calls that were answered and not recorded, though their session is."""
    redacted: int = 0
    """Calls that were recorded without some of their text, and so without token ids."""
    feedback: int = 0


@dataclass(slots=True, eq=False)
class Recorder:
    """Writes the calls of sessions: redacted, and only while there is room. Use goes on whatever happens here."""

    store: ErasableStore
    redaction: Redaction
    counters: SessionCounters
    is_full: bool = False
    """There is no room for more."""
    _writing: set[asyncio.Task[bool]] = field(default_factory=set)

    async def record(self, session: ActiveSession, calls: tuple[Call, ...]) -> None:
        """Write calls of a session, with the session itself if it is not written yet; returns in time in any case."""
        if not session.recorded or (session.closed and not session.begun):
            return
        records = self._records(session, calls)
        if records is None or len(self._writing) >= _WAITING:
            self._missed(session)
        else:
            await self._wait_for(self._write(records, session), session)

    async def begin(self, session: ActiveSession) -> None:
        """Write a session before its first call, if that can be done; else it comes with that call."""
        if session.recorded and not session.begun and not self.is_full and len(self._writing) < _WAITING:
            await self._wait_for(self._put([session.rollout, session.record], session), session)

    async def _wait_for(self, writing: Coroutine[Any, Any, bool], session: ActiveSession) -> None:
        """Wait for what is written of a session; what takes long goes on."""
        task = asyncio.create_task(writing)
        self._writing.add(task)
        session.committing.add(task)
        task.add_done_callback(self._writing.discard)
        task.add_done_callback(session.committing.discard)
        await asyncio.wait({task}, timeout=_PATIENCE)

    def _records(self, session: ActiveSession, calls: tuple[Call, ...]) -> list[Record] | None:
        """None if there is no room, or redaction failed."""
        if self.is_full:
            return None
        try:
            kept = [self.redaction.call(call) for call in calls]
        except Exception:
            logger.exception("A call of session %s is not recorded, because it could not be redacted.", session.id)
            return None
        self.counters.redacted += sum(now is not before for now, before in zip(kept, calls, strict=True))
        if session.closed:
            return list(kept)
        own = [*(() if session.begun else (session.rollout,)), *(() if session.is_whole else (session.record,))]
        return [*own, *kept]

    async def _write(self, records: list[Record], session: ActiveSession) -> bool:
        if await self._put(records, session):
            return True
        self._missed(session)
        return False

    async def _put(self, records: list[Record], session: ActiveSession) -> bool:
        try:
            await self.store.put(*records)
        except Exception as error:
            trace = not isinstance(error, StoreError)
            logger.error("What session %s did is not recorded: %s", session.id, error, exc_info=trace)
            return False
        session.begun = True
        return True

    def _missed(self, session: ActiveSession) -> None:
        """A call was answered and not recorded."""
        self.counters.unrecorded += 1
        session.missed += 1
        if not session.closed:
            session.record = replace(session.record, result={UNRECORDED_CALLS: session.missed})


@dataclass(slots=True, eq=False, kw_only=True)
class ActiveSession(ActiveAttempt):
    """A session that is open, or was. Its calls are answered in any case."""

    application: str
    recorder: Recorder
    end: Callable[[ActiveSession, str], Awaitable[None]]
    """Ends it; the text says how."""
    used: float
    """When it was last used, in Unix seconds."""
    recorded: bool = True
    """Whether it is stored."""
    begun: bool = False
    """Whether the store has it."""
    missed: int = 0
    """Calls that were not recorded."""
    versions: dict[str, int] = field(default_factory=dict)
    """The version of each policy that answers it, if versions of the run's own do: it stays with them."""
    ends_with_reply: bool = False
    """The next reply is its last."""

    @property
    def id(self) -> str:
        return self.rollout.id

    @property
    def is_whole(self) -> bool:
        """Whether the store has its attempt as it is."""
        return self.begun and not self.missed

    @property
    def refuses_late(self) -> bool:
        return False

    @property
    def reply_headers(self) -> dict[str, str]:
        return {HEADER_SESSION: self.id}

    def call_id(self, prefix: str) -> str:
        """The id of a new call; it says which session feedback on it belongs to."""
        return f"{prefix}{self.id}.{uuid.uuid4().hex[:16]}"

    async def keep(self, store: Store, *calls: Call) -> None:
        """Record calls; what cannot be recorded is counted."""
        await self.recorder.record(self, calls)

    async def settled(self) -> bool:
        """Wait for what is being written of it; False if that takes too long."""
        if self.committing:
            _, writing = await asyncio.wait(set(self.committing), timeout=LONGEST_WAIT)
            return not writing
        return True

    async def keep_spans(self, store: Store, *records: Call | ToolResult) -> None:
        """Record what its spans said, redacted, if it is recorded itself and there is room."""
        if self.recorded and self.begun and not self.recorder.is_full:
            await store.put(*map(self.recorder.redaction.record, records))

    async def delivered(self, arrived: bool) -> None:
        self.used = time.time()
        if arrived and self.ends_with_reply and not self.asking:
            await self.end(self, "reply")


@dataclass(frozen=True)
class SessionMaker:
    """Makes the sessions of a run."""

    store: ErasableStore
    run: str
    recorder: Recorder
    answered_by: Answering
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
            session.state = AttemptState.CLOSING
            session.state = AttemptState.COUNTED
        return session

    def _active(self, rollout: Rollout, record: Attempt, **known: Any) -> ActiveSession:
        return ActiveSession(
            rollout,
            record,
            deadline=float("inf"),
            application=str(rollout.task.metadata.get("application")),
            recorder=self.recorder,
            answered_by=self.answered_by,
            end=self.end,
            used=record.started,
            **known,
        )


def session_of_call(call: str) -> str | None:
    """The session of a call, by the call's id; None if it is no call of a session."""
    found = SESSION_ID.search(call)
    return None if found is None else found[0]


def checked_name(name: str | None) -> str | None:
    """The name that an application gave a session, if any. ApiError 400 if it cannot be one."""
    if name is not None and not re.fullmatch(SESSION_NAME.removesuffix("$"), name):
        raise ApiError(
            400,
            f"The header {HEADER_SESSION} has to be a name of up to 200 letters, digits, '.', '_', ':' and '-', not "
            f"{name[:40]!r}.",
            code="session_name",
        )
    return name
