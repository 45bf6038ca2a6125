"""The routes about sessions: of applications, of what collects feedback, and of operators."""

from __future__ import annotations

from starlette.routing import Route

from agl_core.server.api.routes import route, route_of
from agl_core.server.keys import Keys
from agl_core.server.sessions.feedback import FeedbackDesk
from agl_core.server.sessions.sessions import Sessions
from agl_core.store.interface import SessionStore
from agl_core.wire import online as wire
from agl_core.wire.body import Empty
from agl_core.wire.headers import rollout_path


def online_routes(keys: Keys, sessions: Sessions, store: SessionStore) -> list[Route]:
    """What a server answers that records real use."""
    desk = FeedbackDesk(sessions, store)

    async def begin(application: str, body: wire.BeginSession) -> wire.SessionReply:
        session = await sessions.begin_durably(application, body.name, recorded=body.record)
        return wire.SessionReply(
            session=session.id,
            path=rollout_path(*session.key),
            key=sessions.key(session),
            recorded=session.recorded,
        )

    async def end(application: str, body: wire.EndSession) -> Empty:
        await sessions.end_named(application, body.session)
        return Empty()

    async def delete(body: wire.DeleteSessions) -> wire.DeleteReply:
        return wire.DeleteReply(deleted=await sessions.delete(body.sessions))

    return [
        route_of(wire.BEGIN_SESSION, keys, keys.application_of, begin),
        route_of(wire.END_SESSION, keys, keys.application_of, end),
        route_of(wire.FEEDBACK, keys, keys.collector_of, desk.take),
        route(wire.DELETE_SESSIONS, keys, delete),
    ]
