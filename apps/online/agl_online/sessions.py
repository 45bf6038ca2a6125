"""All sessions of a server: attribution of requests, beginning, end and removal, and feedback.

A session is a rollout of mode `use` with one attempt. It belongs to no worker and to no trainer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shlex
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.routing import Route

from agl_core.apis.errors import ApiError
from agl_core.capture.requests import HEADER_ROLLOUT, rollout_path
from agl_core.config.load import LoadedConfig
from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store import Store
from agl_core.types import Annotation, Attempt, AttemptKey, Mode, Rollout, RolloutState, Run, Task
from agl_core.wire import Empty
from agl_online.config import OnlineSection, online_section
from agl_online.session import LONGEST_WAIT, UNRECORDED_CALLS, ActiveSession, Redaction
from agl_online.wire import (
    BEGIN_SESSION,
    DELETE_SESSIONS,
    END_SESSION,
    FEEDBACK,
    HEADER_SESSION,
    HEADER_SESSION_END,
    HEADER_SESSION_RECORD,
    SESSION_NAME,
    ApplicationKeys,
    BeginSession,
    DeleteReply,
    DeleteSessions,
    EndSession,
    FeedbackReply,
    FeedbackRequest,
    Purpose,
    SessionReply,
)
from agl_server.gateway.attempts import Relay, RolloutSource, SourceFactory
from agl_server.http.keys import Keys
from agl_server.routes import route, route_of

logger = logging.getLogger(__name__)

_SESSION_ID = re.compile("use-[0-9a-f]{24}-[0-9a-f]{12}")
"""The middle is its place: a stand-in for its name (`ApplicationKeys.place_of`)."""
_COUNTERS = ("begun", "ended", "deleted", "unrecorded", "redacted", "feedback")
"""Counters since the server's start: sessions, then calls that were not recorded or lost some of their text."""
_DAY = 86_400.0
_BETWEEN_REMOVALS = 600.0


class Sessions(RolloutSource):
    """Opens a server's rollouts for applications, in one event loop; `answering` answers their calls."""

    def __init__(
        self,
        settings: OnlineSection,
        store: Store,
        keys: Keys,
        answering: Relay,
        *,
        run: str,
        folder: Path,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.counted = dict.fromkeys(_COUNTERS, 0)
        self.keys = ApplicationKeys(keys, settings.applications)
        self.redaction = Redaction(settings.redact)
        self.writing: set[asyncio.Task[None]] = set()
        self._settings, self._run, self._folder, self._say = settings, run, folder, say
        self._store, self._operator, self._answering = store, keys, answering
        self._watching: asyncio.Task[None] | None = None
        self._named: dict[str, ActiveSession] = {}
        """Open sessions, by place."""
        self._open: dict[str, ActiveSession] = {}
        """By id, with sessions whose end is not written yet."""
        self._alive: WeakValueDictionary[str, ActiveSession] = WeakValueDictionary()
        """By id, with ended ones that are still held, as by a call under way: a deleted session must not come back."""
        self._unerased: set[str] = set()
        """Ids that could not be erased yet."""
        self._beginning, self._receiving = asyncio.Lock(), asyncio.Lock()
        self._removed = float("-inf")

    @property
    def counters(self) -> dict[str, int]:
        counts = {**self.counted, "open": len(self._open)}
        return {f"online_{name}": count for name, count in counts.items()}

    @property
    def routes(self) -> list[Route]:
        return [
            route_of(BEGIN_SESSION, partial(self.keys.holder, Purpose.APPLICATION), self._answer_begin),
            route_of(END_SESSION, partial(self.keys.holder, Purpose.APPLICATION), self._answer_end),
            route_of(FEEDBACK, partial(self.keys.holder, Purpose.FEEDBACK), self._answer_feedback),
            route(DELETE_SESSIONS, self._operator, self._answer_delete),
        ]

    async def start(self, base_url: str) -> None:
        """Go on with the sessions that an earlier server left open, and watch them."""
        for rollout in await self._store.rollouts(run=self._run, mode=Mode.USE, state=RolloutState.RUNNING):
            session = await self._recall(rollout)
            if session is not None:
                self._open[rollout.id] = self._named[rollout.group] = session
        self._watching = asyncio.create_task(self._watch())
        first = next(iter(self._settings.applications))
        answers = self._settings.upstream or "the versions of the run"
        self._say(f"use: {base_url}/v1, answered by {answers}; {len(self._open)} sessions open")
        self._say(f"     keys: agl sessions key {shlex.quote(str(self._folder))} {first}")

    async def stop(self) -> None:
        """Stop watching, and wait a little for writes under way."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.writing:
            await asyncio.wait(set(self.writing), timeout=LONGEST_WAIT)

    async def attempt_of(self, request: Request) -> ActiveSession | None:
        """The session of a model call, begun if need be; None if the call is of no session.

        ApiError 401 if it names a session without that session's key, 400 if a header is invalid.
        """
        named = request.path_params.get("rollout") or request.headers.get(HEADER_ROLLOUT, "").rpartition("/")[0]
        recorded = request.headers.get(HEADER_SESSION_RECORD) != "off"
        if _SESSION_ID.fullmatch(named):
            session = await self._of_id(named, self.keys.holder(Purpose.SESSION, request, named))
            if session.recorded and not recorded:
                await self._opt_out(session)
        else:
            application = None if named else self.keys.find_holder(Purpose.APPLICATION, request)
            if application is None:
                return None
            name = _checked_name(request.headers.get(HEADER_SESSION))
            session = await self._begin(application, name, recorded=recorded)
        session.ends_with_reply |= request.headers.get(HEADER_SESSION_END) == "1"
        session.used = time.time()
        return session

    async def _begin(self, application: str, name: str | None, *, recorded: bool) -> ActiveSession:
        """The open session of this name, else a new one, which without a name ends with its first reply."""
        place = secrets.token_hex(12) if name is None else self.keys.place_of(application, name)
        async with self._beginning:
            session = self._named.get(place)
            is_new = session is None
            if session is None:
                is_stored = recorded and (name is None or not await self._has_opted_out(place))
                id = f"use-{place}-{secrets.token_hex(6)}"
                session = self._new(id, application, name, recorded=is_stored)
                session.ends_with_reply = name is None
                self._open[id] = self._named[place] = session
                self.counted["begun"] += 1
        if not recorded and (is_new or session.recorded):
            await self._opt_out(session)
        return session

    async def _has_opted_out(self, place: str) -> bool:
        """True if a name's sessions must not be stored, or the store cannot be read."""
        try:
            return bool(await self._store.erased([place]))
        except StoreError as error:
            logger.error("A session is not recorded, because the store cannot be read: %s", error)
            return True

    async def _of_id(self, id: str, application: str) -> ActiveSession:
        """The session of an id, for a request with its key: the live one, else the store's, else an unstored one."""
        async with self._beginning:
            session = self._alive.get(id)
            if session is not None:
                return session
            try:
                rollout = await _stored(self._store, id)
                session = None if rollout is None else await self._recall(rollout)
            except StoreError as error:
                logger.error("Session %s cannot be read, and is not recorded: %s", id, error)
            session = session or self._new(id, application, None, recorded=False)
            if not session.closed:
                self._open[id] = session
            return session

    def _new(self, id: str, application: str, name: str | None, *, recorded: bool) -> ActiveSession:
        place = id.split("-")[1]
        task = Task(place, None, "use", {"application": application, "session": name})
        rollout = Rollout(id, self._run, 0, place, task, Mode.USE, 0, 0, RolloutState.RUNNING)
        attempt = Attempt(id, 0, application, started=time.time())
        return self._active(rollout, attempt, recorded=recorded)

    async def _recall(self, rollout: Rollout) -> ActiveSession | None:
        """A session as the store has it, to go on with; None if it has no attempt."""
        attempts = await self._store.attempts(rollout.id)
        if not attempts:
            return None
        calls = await self._store.calls([attempts[0].key])
        session = self._active(rollout, attempts[0], begun=True)
        session.used = max([attempts[0].started, *(call.ended for call in calls)])
        session.answered.recall(calls)
        session.started_calls = max((call.sequence + 1 for call in calls), default=0)
        session.completed_calls = sum(not call.late for call in calls)
        session.missed = (attempts[0].result or {}).get(UNRECORDED_CALLS, 0)
        session.closed = rollout.state is RolloutState.DONE
        return session

    def _active(self, rollout: Rollout, record: Attempt, **known: Any) -> ActiveSession:
        session = ActiveSession(
            rollout,
            record,
            shared=self,
            answered_by=self._answering,
            reply_headers={HEADER_SESSION: rollout.id},
            used=record.started,
            **known,
        )
        self._alive[session.id] = session
        return session

    async def _find(self, application: str, name: str) -> Rollout:
        """An application's session by its id, or the latest by its name. ApiError 404 if there is none, 410 if it was
        deleted, 403 if it is another application's."""
        place = self.keys.place_of(application, name)
        session = self._alive.get(name) or self._named.get(place)
        if session is not None and session.recorded:
            rollout: Rollout | None = session.rollout
        elif _SESSION_ID.fullmatch(name):
            rollout = await _stored(self._store, name)
        else:
            rollout = next(iter(await self._store.rollouts(group=place, mode=Mode.USE, newest=1)), None)
        if rollout is None:
            if await self._store.erased([name, place]):
                raise ApiError(
                    410,
                    f"The session {name!r} was deleted, or opted out of being stored: nothing of it is kept.",
                    code="session_deleted",
                )
            raise ApiError(
                404,
                f"There is no session {name!r} of this application here, or it is not stored. It is named by the id "
                f"in the reply's header {HEADER_SESSION}, or by the name that the application gave it.",
                code="session_unknown",
            )
        if rollout.task.metadata.get("application") != application:
            raise ApiError(
                403,
                f"The session {name!r} is another application's; this key is not for it.",
                code="foreign_session",
            )
        return rollout

    async def end(self, session: ActiveSession, by: str) -> None:
        """End a session, durably once the store can be written. An ended one stays as it is."""
        if not session.closed:
            session.closed = True
            if self._named.get(session.rollout.group) is session:
                del self._named[session.rollout.group]
            session.record = replace(session.record, result={"ended_by": by, **(session.record.result or {})})
            self.counted["ended"] += 1
        if await session.write_end(self._store):
            self._open.pop(session.id, None)

    async def _delete(self, ids: Collection[str]) -> int:
        """Remove sessions for good; the number that had records. ApiError 404 if one never was here."""
        await check_known(self._store, [id for id in ids if id not in self._alive])
        for session in [session for id in ids if (session := self._alive.get(id)) is not None]:
            session.recorded = False
            await session.wait_until_written()
            await self.end(session, "deletion")
        removed = await self._store.erase(ids)
        self.counted["deleted"] += removed
        return removed

    async def _opt_out(self, session: ActiveSession) -> None:
        """Store nothing more of a session or its name, and remove all that is stored."""
        session.recorded = False
        await session.wait_until_written()
        await self._erase_soon((session.id, session.rollout.group))

    async def _erase_soon(self, ids: Collection[str]) -> None:
        """Erase these, and all that earlier tries left; if the store fails, a later call tries again."""
        self._unerased.update(ids)
        if not self._unerased:
            return
        erasing = frozenset(self._unerased)
        try:
            self.counted["deleted"] += await self._store.erase(erasing)
            self._unerased -= erasing
        except StoreError as error:
            logger.error("Sessions opted out, but cannot be removed from the store yet: %s", error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(LONGEST_WAIT, self._settings.idle_minutes * 60 / 4))
            try:
                await self._look()
            except Exception as error:
                trace = not isinstance(error, StoreError)
                logger.error("Sessions could not be looked after: %s", error, exc_info=trace)

    async def _look(self) -> None:
        """End idle sessions, write ends that failed before, and remove old sessions."""
        before = time.time() - self._settings.idle_minutes * 60
        for session in list(self._open.values()):
            if session.closed or (session.used < before and not session.asking):
                await self.end(session, "idle")
        await self._erase_soon(())
        if self._settings.keep_days is not None and time.monotonic() - self._removed >= _BETWEEN_REMOVALS:
            old = await self._store.ended_before(Mode.USE, time.time() - self._settings.keep_days * _DAY)
            if old:
                await self._delete(old)
            self._removed = time.monotonic()

    async def _answer_begin(self, application: str, body: BeginSession) -> SessionReply:
        session = await self._begin(application, body.name or secrets.token_hex(12), recorded=body.record)
        await session.keep(self._store)
        key = self.keys.of(Purpose.SESSION, application, session.id)
        return SessionReply(session=session.id, path=rollout_path(*session.key), key=key, recorded=session.recorded)

    async def _answer_end(self, application: str, body: EndSession) -> Empty:
        session = self._open.get((await self._find(application, body.session)).id)
        if session is not None:
            await self.end(session, "request")
        return Empty()

    async def _answer_delete(self, body: DeleteSessions) -> DeleteReply:
        return DeleteReply(deleted=await self._delete(body.sessions))

    async def _answer_feedback(self, application: str, request: FeedbackRequest) -> FeedbackReply:
        """Record feedback durably, once, however late. ApiError as of `_find`, and 404 for an unknown call."""
        name = request.session
        if request.call is not None:
            session_id = _SESSION_ID.search(request.call)
            if session_id is None:
                raise _no_call(request.call)
            name = session_id[0]
        assert name is not None, "the request was checked"
        session = (await self._find(application, name)).id
        active = self._alive.get(session)
        if active is not None:  # A reply may go out before its call is written.
            await active.wait_until_written()
        key = AttemptKey(session, 0)
        if request.call is not None and request.call not in {call.id for call in await self._store.calls([key])}:
            raise _no_call(request.call)
        note = None if request.note is None else self.redaction.text(request.note)
        feedback = {"rewards": request.rewards, "note": note}
        annotation = Annotation(*key, request.id or uuid.uuid4().hex, time.time(), feedback, request.call)
        async with self._receiving:
            is_new = annotation.id not in {known.id for known in await self._store.annotations([key])}
            if is_new:
                await self._store.put(annotation)
        self.counted["feedback"] += is_new
        return FeedbackReply(session=session, call=request.call, new=is_new)


async def check_known(store: Store, ids: Collection[str]) -> None:
    """ApiError 404 names sessions that the store never had."""
    erased = await store.erased(ids)
    unknown = [id for id in sorted(set(ids) - erased) if await _stored(store, id) is None]
    if unknown:
        raise ApiError(
            404,
            f"There is no session {', '.join(map(repr, unknown[:5]))} here; nothing was deleted. `agl sessions list` "
            f"has the ids.",
            code="session_unknown",
        )


async def _stored(store: Store, id: str) -> Rollout | None:
    try:
        rollout = await store.rollout(id)
    except StoreRefusedError:
        return None
    return rollout if rollout.id == id and rollout.mode is Mode.USE else None


def _checked_name(name: str | None) -> str | None:
    """The name itself. ApiError 400 if an application's name for a session cannot be one."""
    if name is not None and not re.fullmatch(SESSION_NAME.removesuffix("$"), name):
        raise ApiError(
            400,
            f"The header {HEADER_SESSION} has to be a name of up to 200 letters, digits, '.', '_', ':' and '-', not "
            f"{name[:40]!r}.",
            code="session_name",
        )
    return name


def _no_call(call: str) -> ApiError:
    return ApiError(
        404,
        f"There is no call {call!r} in a session here. A call is named by the `id` of the reply that its client got.",
        code="call_unknown",
    )


def sessions_of(loaded: LoadedConfig, run_dir: Path, answering: Relay, say: Callable[[str], None]) -> SourceFactory:
    """The sessions of a run, as its server makes them. ConfigError without `[online]`."""
    settings = online_section(loaded)

    async def make(store: Store, keys: Keys) -> Sessions:
        if not await store.runs():
            await store.put(Run(run_dir.name, 0, time.time(), loaded.config.model_dump(mode="json")))
        run = (await store.runs())[-1].id
        return Sessions(settings, store, keys, answering, run=run, folder=run_dir, say=say)

    return make
