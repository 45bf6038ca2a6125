"""Sessions of real use, as they were recorded: listing them, and removing them for good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agl_core.config.load import CONFIG_FILE, read_config
from agl_core.errors import ConfigError, StoreError
from agl_core.reading.runs import open_store
from agl_core.server.keys import Keys
from agl_core.store.connections import is_written
from agl_core.store.interface import ErasableStore, Store
from agl_core.types import AttemptKey, Ending, Mode, Rollout
from agl_core.wire.client import BlockingClient
from agl_core.wire.keys import OPERATOR_KEY, SERVER_FILE, ServerFile
from agl_online.feedback import Feedback, said_of
from agl_online.keys import ApplicationKeys
from agl_online.wire import DELETE_SESSIONS, MAX_SESSIONS, DeleteSessions


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """One session."""

    id: str
    application: str
    name: str | None
    """What the application calls it."""
    started: float | None
    ended: float | None
    """None: it is open."""
    ending: Ending | None
    calls: int
    feedback: Sequence[Feedback] = field(default=())


async def list_sessions(store: Store, limit: int, application: str | None = None) -> list[SessionEntry]:
    """The latest sessions of an application, or of all, oldest first."""
    found = await store.rollouts(mode=Mode.USE, newest=None if application else limit)
    wanted = [each for each in found if application in (None, each.task.metadata.get("application"))][-limit:]
    return [await _entry_of(store, each) for each in wanted]


async def find_session(store: Store, id: str) -> SessionEntry:
    """The session of this id, or whose id begins like this."""
    return await _entry_of(store, await store.rollout(id))


async def _entry_of(store: Store, rollout: Rollout) -> SessionEntry:
    key = AttemptKey(rollout.id, 0)
    attempts = await store.attempts(rollout.id)
    said = said_of(await store.annotations([key])) if isinstance(store, ErasableStore) else []
    return SessionEntry(
        id=rollout.id,
        application=str(rollout.task.metadata.get("application")),
        name=rollout.task.metadata.get("session"),
        started=attempts[0].started if attempts else None,
        ended=attempts[0].ended if attempts else None,
        ending=rollout.ending,
        calls=sum(not call.late and not call.undelivered for call in await store.calls([key])),
        feedback=tuple(said),
    )


async def delete_sessions(folder: Path, ids: Sequence[str], operator_key: str | None) -> int:
    """Remove sessions of a run for good, by its server if one runs; returns how many had anything recorded.

    `operator_key` is that of the server, if the user chose one. ConfigError or StoreError says what is wrong.
    """
    if not is_written(folder / "store.sqlite"):
        async with open_store(folder, read_only=False) as store:
            return await _delete_here(store, ids, folder)
    server = ServerFile.read(folder / SERVER_FILE)
    key = operator_key or (server and server.operator_key)
    if server is None or not key:
        raise ConfigError(
            f"A server is writing {folder}, and the key to it is not known here. Set {OPERATOR_KEY} to the value that "
            f"it has there, or stop the server first."
        )
    with BlockingClient(server.base_url, key) as client:
        some = [list(ids[start : start + MAX_SESSIONS]) for start in range(0, len(ids), MAX_SESSIONS)]
        return sum(client.ask(DELETE_SESSIONS, DeleteSessions(sessions=each)).deleted for each in some)


async def _delete_here(store: Store, ids: Sequence[str], folder: Path) -> int:
    if not isinstance(store, ErasableStore):
        raise StoreError(f"The store of {folder} cannot remove sessions.")
    known = {each.id for each in await store.rollouts(mode=Mode.USE)} | await store.erased(ids)
    unknown = [id for id in ids if id not in known]
    if unknown:
        raise StoreError(f"There is no session {', '.join(unknown[:5])} in {folder}; nothing was deleted.")
    return await store.erase(ids)


def key_of(folder: Path, application: str, *, feedback: bool) -> str:
    """A key of an application of this run. ConfigError if there is no such application, or no server was started."""
    online = read_config(folder / CONFIG_FILE).tables_of_plugins.get("online", {})
    applications = online.get("applications", {})
    server = ServerFile.read(folder / SERVER_FILE)
    if application not in applications:
        known = ", ".join(applications) or "none: it has no [online]"
        raise ConfigError(f"The run {folder} has no application '{application}'. Known: {known}.")
    if server is None:
        raise ConfigError(f"The run {folder} has no keys yet: start it once with `agl serve`.")
    keys = ApplicationKeys(Keys(secret=server.agent_secret), applications)
    return keys.of_feedback(application) if feedback else keys.of_application(application)
