"""Taking feedback in: joined by the id of a call, a trace or a session, however late, and once."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from agl_core.server.errors import ApiError
from agl_core.store.interface import ErasableStore
from agl_core.types import AttemptKey
from agl_core.wire.headers import HEADER_TRACE
from agl_online.feedback import Feedback, said_of
from agl_online.session import session_of_call
from agl_online.sessions import Sessions
from agl_online.wire import FeedbackReply, FeedbackRequest


class FeedbackDesk:
    """Takes feedback in."""

    def __init__(self, sessions: Sessions, store: ErasableStore) -> None:
        self._sessions, self._store = sessions, store
        self._taking = asyncio.Lock()

    async def take(self, application: str, request: FeedbackRequest) -> FeedbackReply:
        """Record feedback on a session of this application, durably.

        ApiError 404 or 410 if there is no such call, trace or session (any more), 403 if it is another application's,
        409 if these do not go together, or if other feedback came under the same id.
        """
        if request.trace is not None:
            request = request.model_copy(update={"call": await self._last_of(application, request.trace)})
        session = await self._session_of(application, request)
        key = AttemptKey(session, 0)
        await self._sessions.written(session)
        if request.call is not None and request.call not in {call.id for call in await self._store.calls([key])}:
            raise _no_call(request.call)
        redaction = self._sessions.redaction
        feedback = Feedback(
            session,
            id=request.id or uuid.uuid4().hex,
            received=time.time(),
            rewards=request.rewards,
            call=request.call,
            correction=redaction.json(request.correction),
            note=None if request.note is None else redaction.text(request.note),
        )
        async with self._taking:
            if _is_known(feedback, said_of(await self._store.annotations([key])), request.id):
                return FeedbackReply(session=session, call=request.call, new=False)
            await self._store.put(feedback.annotation)
        self._sessions.counted.feedback += 1
        return FeedbackReply(session=session, call=request.call, new=True)

    async def _last_of(self, application: str, trace: str) -> str:
        """The last call of a trace in a session of this application."""
        calls = [call for session, call in await self._sessions.traced(application, trace)]
        if not calls:
            raise ApiError(
                404,
                f"There is no call of the trace {trace!r} in a session here, or its session was deleted. A call has "
                f"the trace id of its request's header {HEADER_TRACE}.",
                code="trace_unknown",
            )
        return calls[-1]

    async def _session_of(self, application: str, request: FeedbackRequest) -> str:
        by_call = None
        if request.call is not None:
            session = session_of_call(request.call)
            if session is None:
                raise _no_call(request.call)
            by_call = await self._sessions.located(application, session)
        if request.session is None:
            assert by_call is not None
            return by_call.id
        found = await self._sessions.located(application, request.session)
        if by_call is None or by_call.id == found.id:
            return found.id
        if by_call.group == found.group and request.session != found.id:
            return by_call.id  # An earlier session of the same name.
        raise ApiError(
            409,
            f"The call {request.call!r} is of another session than {request.session!r}: send one of them.",
            code="session_mismatch",
        )


def _is_known(new: Feedback, taken: Sequence[Feedback], id: str | None) -> bool:
    """Whether this came before: under its id or, without one, as the latest on its call or session. ApiError 409 if
    other feedback has its id."""
    if id is None:
        latest = [each for each in taken if each.call == new.call][-1:]
        return any(_says(each) == _says(new) for each in latest)
    for each in taken:
        if each.id == id and _says(each) != _says(new):
            raise ApiError(
                409,
                f"Other feedback on this session came under the id {id!r}. Give each an id of its own, or none.",
                code="feedback_known",
            )
    return any(each.id == id for each in taken)


def _says(feedback: Feedback) -> tuple[object, ...]:
    return feedback.call, dict(feedback.rewards), feedback.correction, feedback.note


def _no_call(call: str) -> ApiError:
    return ApiError(
        404,
        f"There is no call {call!r} in a session here. A call is named by the `id` of the reply that its client got.",
        code="call_unknown",
    )
