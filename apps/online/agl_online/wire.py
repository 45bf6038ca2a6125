"""Requests of applications, feedback collectors and operators about sessions of real use, and their keys."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator
from starlette.requests import Request

from agl_core.wire import Body, Empty, Operation, Right
from agl_server.http.keys import Keys, carries, refused_key

HEADER_SESSION = "x-agl-session"
"""With an application's key: the name that it gives the session of a call. On the server's reply: the session's id."""
HEADER_SESSION_END = "x-agl-session-end"
"""`1`: the session ends with the reply to this call."""
HEADER_SESSION_RECORD = "x-agl-session-record"
"""`off`: nothing of the session is stored."""

MAX_FEEDBACK = 1 << 20
"""Bytes of one feedback."""
MAX_SESSIONS = 1000
"""Sessions that one request may name."""
SESSION_NAME = r"^[A-Za-z0-9._:-]{1,200}$"
"""The name that an application gives a session."""

Name: TypeAlias = Annotated[str, Field(pattern=SESSION_NAME)]
_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]


class Purpose(StrEnum):
    """The purpose of an application's key."""

    APPLICATION = "application"
    """Model calls of the application, which are recorded as sessions; beginning and ending these."""
    FEEDBACK = "feedback"
    """Feedback on its sessions."""
    SESSION = "session"
    """The model calls of one of its sessions."""


_HINTS = {
    Purpose.APPLICATION: "This route takes an application's key (`agl sessions key RUN APPLICATION`).",
    Purpose.FEEDBACK: "This route takes the key for feedback alone (`agl sessions key RUN APPLICATION --feedback`).",
    Purpose.SESSION: "A session's own path takes the key that came with the session.",
}


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


BEGIN_SESSION = Operation("POST", "/agl/v1/sessions", Purpose.APPLICATION, BeginSession, SessionReply)
END_SESSION = Operation("POST", "/agl/v1/sessions/end", Purpose.APPLICATION, EndSession, Empty)
FEEDBACK = Operation("POST", "/agl/v1/feedback", Purpose.FEEDBACK, FeedbackRequest, FeedbackReply, MAX_FEEDBACK)
DELETE_SESSIONS = Operation("POST", "/agl/v1/sessions/delete", Right.OPERATOR, DeleteSessions, DeleteReply)


@dataclass(frozen=True, slots=True)
class ApplicationKeys:
    """The keys of applications, derived from those of a run's server."""

    server: Keys
    applications: Mapping[str, int]
    """The number of keys by name: another number makes other keys."""

    def of(self, purpose: Purpose, application: str, session: str = "") -> str:
        """An application's key for a purpose; `Purpose.SESSION` has one for each session."""
        own = f"{purpose}/{self.applications[application]}/{application}"
        return self.server.derive(f"{own}/{session}" if session else own)

    def place_of(self, application: str, name: str) -> str:
        """A stand-in for a session's name in ids, which does not reveal the name."""
        return hmac.digest(self.server.secret.encode(), f"name/{application}/{name}".encode(), "sha256").hex()[:24]

    def find_holder(self, purpose: Purpose, request: Request, session: str = "") -> str | None:
        """The application whose key for this purpose the request carries; None without such a key."""
        return next((name for name in self.applications if carries(request, self.of(purpose, name, session))), None)

    def holder(self, purpose: Purpose, request: Request, session: str = "") -> str:
        """The same; ApiError 401 instead of None."""
        name = self.find_holder(purpose, request, session)
        if name is None:
            raise refused_key(request, _HINTS[purpose])
        return name
