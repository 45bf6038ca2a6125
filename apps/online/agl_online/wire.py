"""The requests about sessions of real use: of applications, of what collects feedback, of operators; and their keys."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator
from starlette.requests import Request

from agl_core.server.keys import Keys, carries, refused_key
from agl_core.wire import Body, Empty, Operation, Right

HEADER_SESSION = "x-agl-session"
"""With an application's key: the name that it gives the session of a call. On the server's reply: the session's id."""
HEADER_SESSION_END = "x-agl-session-end"
"""`1`: the session ends with the reply to this call."""
HEADER_SESSION_RECORD = "x-agl-session-record"
"""`off`: nothing of the session is stored."""

APPLICATION, COLLECTOR = "application", "feedback"
"""Whose keys the requests need, beside those of core: of `agl sessions key`, and with `--feedback`."""

MAX_FEEDBACK = 1 << 20
"""Bytes of one feedback."""
MAX_SESSIONS = 1000
"""Sessions that one request may name."""
SESSION_NAME = r"^[A-Za-z0-9._:-]{1,200}$"
"""The name that an application gives a session."""

Name: TypeAlias = Annotated[str, Field(pattern=SESSION_NAME)]
_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]


class BeginSession(Body):
    """Begin a session, or find the open one of this name."""

    name: Name | None = Field(None, description="What the application calls it; absent: it has no name.")
    record: bool = Field(True, description="False: nothing of the session is stored.")


class SessionReply(Body):
    """A session, and how the agent reaches the model in it."""

    session: str = Field(description="Its id.")
    path: str = Field(description="The path before /v1 in the session's own base URL.")
    key: str = Field(repr=False, description="The agent's API key: good for the model calls of this session only.")
    recorded: bool = Field(description="Whether it is stored.")


class EndSession(Body):
    """End one of the application's own sessions. Sending it again changes nothing."""

    session: Name = Field(description="Its id, or its name.")


class FeedbackRequest(Body):
    """Say how good the reply to one call was, or a session. Sending it again changes nothing."""

    call: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None, description="The id of a reply, as the client of the model got it."
    )
    session: Name | None = Field(None, description="A session's id or name; of several of one name, the latest.")
    rewards: dict[Name, _Number] = Field(
        {}, max_length=100, description="Numbers by name, such as thumbs: 1 is up, 0 is down."
    )
    note: str | None = Field(None, max_length=100_000)
    id: Name | None = Field(None, description="Feedback that is sent again under this id is taken in once.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if (self.call is None) == (self.session is None):
            raise ValueError("has to name a call or a session")
        if not self.rewards and self.note is None:
            raise ValueError("says nothing: give rewards or a note")
        return self


class FeedbackReply(Body):
    """The call or session that the feedback was joined with."""

    session: str
    call: str | None = Field(description="Null: it is about the whole session.")
    new: bool = Field(description="False: this was taken in before.")


class DeleteSessions(Body):
    """Remove sessions for good. Sending it again changes nothing."""

    sessions: list[Name] = Field(min_length=1, max_length=MAX_SESSIONS, description="Their ids.")


class DeleteReply(Body):
    """How many sessions had anything recorded."""

    deleted: int


BEGIN_SESSION = Operation("POST", "/agl/v1/sessions", APPLICATION, BeginSession, SessionReply)
END_SESSION = Operation("POST", "/agl/v1/sessions/end", APPLICATION, EndSession, Empty)
FEEDBACK = Operation("POST", "/agl/v1/feedback", COLLECTOR, FeedbackRequest, FeedbackReply, MAX_FEEDBACK)
DELETE_SESSIONS = Operation("POST", "/agl/v1/sessions/delete", Right.OPERATOR, DeleteSessions, DeleteReply)


@dataclass(frozen=True, slots=True)
class ApplicationKeys:
    """Keys derived from those of a run's server.

    application  model calls of a deployed application, which are recorded as sessions; beginning and ending these
    session      the calls of one session
    feedback     feedback on the sessions of one application
    """

    server: Keys
    applications: Mapping[str, int]
    """By name, the number of its keys: another number makes other keys."""

    def of_application(self, name: str) -> str:
        return self.server.derive(f"application/{self.applications[name]}/{name}")

    def of_feedback(self, name: str) -> str:
        return self.server.derive(f"feedback/{self.applications[name]}/{name}")

    def of_session(self, application: str, session: str) -> str:
        return self.server.derive(f"session/{self.applications[application]}/{application}/{session}")

    def place_of(self, application: str, name: str) -> str:
        """A stand-in for the name that an application gave a session, in ids; it does not reveal the name."""
        return hmac.digest(self.server.secret.encode(), f"name/{application}/{name}".encode(), "sha256").hex()[:24]

    def application_of(self, request: Request) -> str | None:
        """The application whose key the request carries; None if it is no such key."""
        return next((name for name in self.applications if carries(request, self.of_application(name))), None)

    def caller(self, request: Request) -> str:
        """The same; ApiError 401 instead of None."""
        hint = "This route takes an application's key (`agl sessions key RUN APPLICATION`)."
        return self._holder(request, self.of_application, hint)

    def collector(self, request: Request) -> str:
        """The application on whose sessions the request's key may give feedback. ApiError 401 without one."""
        hint = "This route takes the key for feedback alone (`agl sessions key RUN APPLICATION --feedback`)."
        return self._holder(request, self.of_feedback, hint)

    def user_of_session(self, request: Request, session: str) -> str:
        """The application whose session this is, by the key that the request carries. ApiError 401 without it."""
        hint = "A session's own path takes the key that came with the session."
        return self._holder(request, lambda application: self.of_session(application, session), hint)

    def _holder(self, request: Request, key_of: Callable[[str], str], hint: str) -> str:
        for name in self.applications:
            if carries(request, key_of(name)):
                return name
        raise refused_key(request, hint)
