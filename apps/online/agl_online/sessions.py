"""All sessions of a server: whose request is of which, and when each begins, ends and is removed.

A session is a rollout of mode `use` with one attempt. It belongs to no worker and to no trainer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from starlette.requests import Request
from starlette.routing import Route

from agl_core.config.load import LoadedConfig
from agl_core.errors import ConfigError, StoreError
from agl_core.protocols import Upstream
from agl_core.server.api import route, route_of
from agl_core.server.attempt import AttemptState
from agl_core.server.errors import ApiError
from agl_core.server.keys import Keys, SourceFactory, SpanOwner
from agl_core.server.upstream import Answering, Relay, RunSettings
from agl_core.store.interface import ErasableStore, Store
from agl_core.types import Ending, Mode, Rollout, RolloutState, Run
from agl_core.wire.headers import HEADER_ROLLOUT, rollout_path
from agl_core.wire.workers import Empty
from agl_online.config import OnlineSection, online_section
from agl_online.keys import ApplicationKeys
from agl_online.kinds import Redactor
from agl_online.redaction import Redaction
from agl_online.session import (
    LONGEST_WAIT,
    RECORDED,
    SESSION_ID,
    UNRECORDED,
    UNRECORDED_CALLS,
    ActiveSession,
    Recorder,
    SessionCounters,
    SessionMaker,
    checked_name,
)
from agl_online.wire import (
    BEGIN_SESSION,
    DELETE_SESSIONS,
    END_SESSION,
    FEEDBACK,
    HEADER_SESSION,
    HEADER_SESSION_END,
    HEADER_SESSION_RECORD,
    OPERATIONS,
    BeginSession,
    DeleteReply,
    DeleteSessions,
    EndSession,
    SessionReply,
)

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_REMEMBERED = 10_000
"""Ended sessions that memory keeps."""
_DAY = 86_400.0
_BETWEEN_REMOVALS = 600.0


@dataclass(slots=True)
class Room:
    """What sessions may fill; the limit is in GiB."""

    folder: Path
    """Of the store."""
    least: float
    """The free space of the disk below which there is none."""
    _was_there: bool = True

    async def is_there(self) -> bool:
        """Whether there is room now; a change for the worse is logged."""
        there = await asyncio.to_thread(self._look)
        if self._was_there and not there:
            logger.warning("There is no room for more sessions in %s: they are answered, not recorded.", self.folder)
        self._was_there = there
        return there

    def _look(self) -> bool:
        return shutil.disk_usage(self.folder).free >= self.least * _GIB


class Sessions:
    """The sessions of applications: what a server opens rollouts by (`agl_core.server.keys.RolloutSource`).

    `answering` answers their calls, `run` and `folder` are of the run that records them, `redactors` those of plugins
    beside the patterns of the settings. All methods belong to one event loop.
    """

    operations = OPERATIONS

    def __init__(
        self,
        settings: OnlineSection,
        store: ErasableStore,
        keys: Keys,
        answering: Answering,
        *,
        run: str,
        folder: Path,
        redactors: Sequence[Redactor] = (),
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.counted = SessionCounters()
        self.keys = ApplicationKeys(keys, settings.applications)
        self.redaction = Redaction(settings.redact, redactors)
        self._settings, self._run, self._say = settings, run, say
        self._room = Room(folder, settings.min_free_gib)
        self._store, self._operator = store, keys
        self._recorder = Recorder(store, self.redaction, self.counted)
        self._maker = SessionMaker(store, run, self._recorder, answering, self.end)
        self._watching: asyncio.Task[None] | None = None
        self._open: dict[str, ActiveSession] = {}
        """By id."""
        self._named: dict[str, ActiveSession] = {}
        """Open ones, by what stands for their names."""
        self._known: OrderedDict[str, ActiveSession] = OrderedDict()
        """Open and ended ones, by id."""
        self._unerased: set[str] = set()
        """Ids that could not be erased yet."""
        self._unwritten: list[ActiveSession] = []
        """Ended ones whose end could not be written yet."""
        self._beginning = asyncio.Lock()
        self._removed = float("-inf")

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def counters(self) -> dict[str, int]:
        """For the server's health."""
        return {f"online_{name}": count for name, count in {**asdict(self.counted), "open": self.open}.items()}

    @property
    def routes(self) -> list[Route]:
        """The routes of applications, of what collects feedback, and of operators."""
        from agl_online.desk import FeedbackDesk

        desk = FeedbackDesk(self, self._store)
        return [
            route_of(BEGIN_SESSION, self.keys.caller, self._answer_begin),
            route_of(END_SESSION, self.keys.caller, self._answer_end),
            route_of(FEEDBACK, self.keys.collector, desk.take),
            route(DELETE_SESSIONS, self._operator, self._answer_delete),
        ]

    async def start(self, base_url: str) -> None:
        """Go on with the sessions that an earlier server left open, and look after them."""
        await self._take_up()
        self._watching = asyncio.create_task(self._watch())
        first = next(iter(self._settings.applications))
        answers = self._settings.upstream or "the versions of the run"
        self._say(f"use: {base_url}/v1, answered by {answers}; {self.open} sessions open")
        self._say(f"     keys: agl sessions key {shlex.quote(str(self._room.folder))} {first}")

    async def _take_up(self) -> None:
        self._recorder.is_full = not await self._room.is_there()
        for rollout in await self._store.rollouts(run=self._run, mode=Mode.USE, state=RolloutState.RUNNING):
            session = await self._maker.recalled(rollout)
            if session is not None:
                self._open[rollout.id] = self._named[rollout.group] = self._known[rollout.id] = session

    async def attempt_of(self, request: Request) -> ActiveSession | None:
        """The session that a model call belongs to; it is begun if need be. None if the call is of no session.

        ApiError 401 if it names a session without that session's key, 400 if a header of it is invalid.
        """
        named = request.path_params.get("rollout") or request.headers.get(HEADER_ROLLOUT, "").rpartition("/")[0]
        recorded = request.headers.get(HEADER_SESSION_RECORD) != "off"
        if SESSION_ID.fullmatch(named):
            session = await self._of_id(named, self.keys.user_of_session(request, named))
            if session.recorded and not recorded:
                await self._opt_out(session)
        else:
            application = None if named else self.keys.application_of(request)
            if application is None:
                return None
            name = checked_name(request.headers.get(HEADER_SESSION))
            session = await self.begin(application, name, recorded=recorded)
        session.ends_with_reply |= request.headers.get(HEADER_SESSION_END) == "1"
        session.used = time.time()
        return session

    async def begin(self, application: str, name: str | None, *, recorded: bool = True) -> ActiveSession:
        """The open session of this name, else a new one; without a name one that ends with its first reply."""
        place = secrets.token_hex(12) if name is None else self.keys.place_of(application, name)
        async with self._beginning:
            session = self._named.get(place)
            is_new = session is None
            if session is None:
                may_be = recorded and (name is None or await self._may_be_recorded(place))
                id = f"{RECORDED if may_be else UNRECORDED}-{place}-{secrets.token_hex(6)}"
                session = self._maker.new(id, application, name)
                session.ends_with_reply = name is None
                self._open[id] = self._known[id] = self._named[place] = session
                self.counted.begun += 1
        if not recorded and (is_new or session.recorded):
            await self._opt_out(session)
        return session

    async def begin_durably(self, application: str, name: str | None, *, recorded: bool) -> ActiveSession:
        """The same for a session that may have several calls; it is in the store before its first one, if it can be."""
        session = await self.begin(application, name or secrets.token_hex(12), recorded=recorded)
        await self._recorder.begin(session)
        return session

    async def located(self, application: str, name: str) -> Rollout:
        """An application's session by its id or name; of several of one name, the latest.

        ApiError 404 if there is none, 410 if it was deleted, 403 if it is another application's.
        """
        place = self.keys.place_of(application, name)
        known = self._known.get(name) or self._named.get(place)
        if known is not None and known.recorded:
            found: Rollout | None = known.rollout
        elif SESSION_ID.fullmatch(name):
            found = await self._maker.stored(name)
        else:
            found = next(iter(await self._store.rollouts(group=place, mode=Mode.USE, newest=1)), None)
        if found is None:
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
        if found.task.metadata.get("application") != application:
            raise _foreign(f"session {name!r}")
        return found

    async def written(self, id: str) -> None:
        """Wait for what is being written of a session: a reply may go out before its call is written."""
        session = self._known.get(id)
        if session is not None:
            await session.settled()

    async def traced(self, application: str, trace: str) -> list[tuple[str, str]]:
        """The session and the id of each call of an application with this trace id, the earliest first.

        ApiError 403 if only other applications have such calls: services share the trace of a request.
        """
        found = [each for each in await self._store.traced(trace) if SESSION_ID.fullmatch(each[0])]
        rollouts = {id: await self._store.rollout(id) for id in dict.fromkeys(session for session, _ in found)}
        own = [each for each in found if rollouts[each[0]].task.metadata.get("application") == application]
        if found and not own:
            raise _foreign(f"trace {trace!r}")
        return own

    async def owner_of_spans(self, request: Request) -> SpanOwner | None:
        """Of an application's own key, each trace's open session with the latest call of it; else the request's."""
        application = None if "rollout" in request.path_params else self.keys.application_of(request)
        session = None if application is not None else await self.attempt_of(request)
        if application is None and session is None:
            return None

        async def owner(trace: str) -> ActiveSession | None:
            if application is None:
                return session
            found = [name for name, _ in await self.traced(application, trace) if name in self._open]
            return self._open[found[-1]] if found else None

        return owner

    async def end_named(self, application: str, name: str) -> None:
        """End an application's session by its id or name; one that has ended stays as it is. ApiError as above."""
        rollout = await self.located(application, name)
        session = self._known.get(rollout.id)
        if session is not None:
            await self.end(session, "request")

    async def end(self, session: ActiveSession, by: str) -> None:
        """End a session, durably if the store can be written; one that has ended stays as it is."""
        if session.closed:
            return
        session.state = AttemptState.CLOSING
        self._forget(session)
        missed = {UNRECORDED_CALLS: session.missed} if session.missed else {}
        session.record = replace(session.record, result={"ended_by": by, **missed})
        if not await self._write_end(session):
            self._unwritten.append(session)
        self.counted.ended += 1

    async def delete(self, ids: Collection[str]) -> int:
        """Remove sessions for good; returns how many had anything recorded. ApiError 404 if one never was here."""
        asked = sorted(set(ids) - await self._store.erased(ids))
        unknown = [id for id in asked if not await self._is_there(id)]
        if unknown:
            raise ApiError(
                404,
                f"There is no session {', '.join(map(repr, unknown[:5]))} here; nothing was deleted. `agl sessions "
                f"list` has the ids.",
                code="session_unknown",
            )
        for id in ids:
            session = self._known.get(id)
            if session is not None:
                await self._silence(session)
        removed = await self._store.erase(ids)
        self.counted.deleted += removed
        return removed

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(LONGEST_WAIT, self._settings.idle_minutes * 60 / 4))
            try:
                await self.look()
            except Exception as error:
                trace = not isinstance(error, StoreError)
                logger.error("Sessions could not be looked after: %s", error, exc_info=trace)

    async def look(self) -> None:
        """End sessions that are idle, remove old ones, and see whether there is room."""
        self._recorder.is_full = not await self._room.is_there()
        before = time.time() - self._settings.idle_minutes * 60
        for session in [each for each in self._open.values() if each.used < before and not each.asking]:
            await self.end(session, "idle")
        await self._erase_soon(())
        self._unwritten = [each for each in self._unwritten if not await self._write_end(each)]
        await self._remove_old()

    async def stop(self) -> None:
        """Wait a little for what is being written."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        writing = {task for session in self._known.values() for task in session.committing}
        if writing:
            await asyncio.wait(writing, timeout=LONGEST_WAIT)

    async def _answer_begin(self, application: str, body: BeginSession) -> SessionReply:
        session = await self.begin_durably(application, body.name, recorded=body.record)
        key = self.keys.of_session(session.application, session.id)
        return SessionReply(session=session.id, path=rollout_path(*session.key), key=key, recorded=session.recorded)

    async def _answer_end(self, application: str, body: EndSession) -> Empty:
        await self.end_named(application, body.session)
        return Empty()

    async def _answer_delete(self, body: DeleteSessions) -> DeleteReply:
        return DeleteReply(deleted=await self.delete(body.sessions))

    async def _of_id(self, id: str, application: str) -> ActiveSession:
        """The session of an id, for a request that has its key."""
        session = self._known.get(id)
        if session is None:
            async with self._beginning:
                session = self._known.get(id) or await self._found(id, application)
                self._known[id] = session
        return session

    async def _found(self, id: str, application: str) -> ActiveSession:
        """What the store has of a session that memory does not have, or a new one of this id."""
        recorded = id.startswith(RECORDED)
        try:
            if recorded and not await self._store.erased([id]):
                rollout = await self._maker.stored(id)
                session = None if rollout is None else await self._maker.recalled(rollout)
                return self._opened(session or self._maker.new(id, application, None))
        except StoreError as error:
            logger.error("Session %s cannot be read, and is not recorded: %s", id, error)
        session = self._maker.new(id, application, None)
        session.recorded = False
        return self._opened(session)

    def _opened(self, session: ActiveSession) -> ActiveSession:
        if not session.closed:
            self._open[session.id] = session
        return session

    async def _may_be_recorded(self, place: str) -> bool:
        """Whether the sessions of a name have not opted out; False if the store cannot be read."""
        try:
            return not await self._store.erased([place])
        except StoreError as error:
            logger.error("A session is not recorded, because the store cannot be read: %s", error)
            return False

    async def _write_end(self, session: ActiveSession) -> bool:
        """Write how a session ended; False if that has to be tried again."""
        if not await session.settled():
            return False
        if not session.begun or not session.recorded:
            session.state = AttemptState.COUNTED
            return True
        ending, error = Ending.FINISHED, None
        if session.missed:
            ending, error = Ending.LOST, f"{session.missed} of its calls were answered and could not be recorded."
        elif not session.completed_calls:
            ending = Ending.NO_CALL
        record = replace(session.record, ended=session.used, ending=ending, error=error)
        record = replace(record, passed_through=session.passed_through or None)
        rollout = replace(session.rollout, state=RolloutState.DONE, ending=ending, counted_attempt=0)
        try:
            await self._store.put(record, rollout)
        except StoreError as failed:
            logger.error("The end of session %s is not written yet: %s", session.id, failed)
            return False
        session.record, session.rollout = record, rollout
        session.state = AttemptState.COUNTED
        session.answered.clear()
        return True

    def _forget(self, session: ActiveSession) -> None:
        self._open.pop(session.id, None)
        if self._named.get(session.rollout.group) is session:
            del self._named[session.rollout.group]
        self._known.move_to_end(session.id)
        while len(self._known) > _REMEMBERED + len(self._open):
            oldest = next(iter(self._known.values()))
            if not oldest.closed:
                self._known.move_to_end(oldest.id)
            else:
                del self._known[oldest.id]

    async def _opt_out(self, session: ActiveSession) -> None:
        """Store nothing of a session any more, nor of others of its name, and remove what is stored."""
        session.recorded = False
        await session.settled()
        await self._erase_soon((session.id, session.rollout.group))

    async def _erase_soon(self, ids: Collection[str]) -> None:
        """Erase these and what could not be erased before; if the store fails, this is tried again later."""
        self._unerased.update(ids)
        if not self._unerased:
            return
        erasing = frozenset(self._unerased)
        try:
            self.counted.deleted += await self._store.erase(erasing)
            self._unerased -= erasing
        except StoreError as error:
            logger.error("Sessions opted out, but cannot be removed from the store yet: %s", error)

    async def _silence(self, session: ActiveSession) -> None:
        """End a session of which nothing is to be left."""
        session.recorded = False
        await session.settled()
        await self.end(session, "deletion")

    async def _is_there(self, id: str) -> bool:
        return id in self._known or await self._maker.stored(id) is not None

    async def _remove_old(self) -> None:
        if self._settings.keep_days is None or time.monotonic() - self._removed < _BETWEEN_REMOVALS:
            return
        old = await self._store.ended_before(Mode.USE, time.time() - self._settings.keep_days * _DAY)
        if old:
            await self.delete(old)
        self._removed = time.monotonic()


def _foreign(what: str) -> ApiError:
    return ApiError(403, f"The {what} is another application's; this key is not for it.", code="foreign_session")


def fixed_upstream(upstream: Upstream, settings: RunSettings) -> Relay:
    """A model server that answers all sessions; `withdraw` closes its connections."""
    relay = Relay(lambda lending: None)
    # What does not return ids may be a hosted API, which refuses settings that it does not know.
    relay.serve(upstream, settings if upstream.returns_ids else replace(settings, sampling=None))
    return relay


def sessions_of(loaded: LoadedConfig, run_dir: Path, answering: Answering, say: Callable[[str], None]) -> SourceFactory:
    """The sessions of a run, as its server makes them. ConfigError without `[online]`, or for another kind of store."""
    settings = online_section(loaded)
    redactors = [chosen.build() for chosen in loaded.sections["online"].parts.get("redactors", {}).values()]

    async def made(store: Store, keys: Keys) -> Sessions:
        if not isinstance(store, ErasableStore):
            raise ConfigError(
                f"[online] needs a store that can remove what it has and take feedback, and "
                f"'{loaded.config.store.name}' cannot. Use the store 'sqlite', or leave [online] out."
            )
        if not await store.runs():
            await store.put(Run(run_dir.name, 0, time.time(), loaded.config.model_dump(mode="json")))
        run = (await store.runs())[-1].id
        return Sessions(settings, store, keys, answering, run=run, folder=run_dir, redactors=redactors, say=say)

    return made
