"""The requests about sessions of real use: of applications, of what collects feedback, and of operators."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, model_validator

from agl_core.wire.workers import AnyOperation, Body, Empty, Operation, Right

HEADER_SESSION = "x-agl-session"
"""With an application's key: the name that it gives the session of a call. On the server's reply: the session's id."""
HEADER_SESSION_END = "x-agl-session-end"
"""`1`: the session ends with the reply to this call."""
HEADER_SESSION_RECORD = "x-agl-session-record"
"""`off`: nothing of the session is stored."""
HEADER_ANSWERED = "x-agl-policy"
"""On a reply of a served policy: the version that answered, as `calc@40`."""

APPLICATION, COLLECTOR = "application", "feedback"
"""Whose keys the requests need, beside those of core: of `agl sessions key`, and with `--feedback`."""

MAX_FEEDBACK = 1 << 20
"""Bytes of one feedback."""
MAX_PARTS = 100
"""Numbers in one feedback."""
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
    """Say how good a session was, or the reply to one call. Sending it again changes nothing."""

    call: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None, description="The id of a reply, as the client of the model got it."
    )
    session: Name | None = Field(None, description="A session's id or name; of several of one name, the latest.")
    trace: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        None, description="The W3C trace id of the requests to the model: it means the last reply of this trace."
    )
    reward: _Number | None = None
    parts: dict[Name, _Number] = Field({}, max_length=MAX_PARTS, description="Further numbers, by name.")
    thumbs: Literal["up", "down"] | None = None
    correction: JsonValue = Field(None, description="What the answer should have been.")
    note: str | None = Field(None, max_length=100_000)
    id: Name | None = Field(None, description="Feedback that is sent again under this id is taken in once.")

    @property
    def rewards(self) -> dict[str, float]:
        """All its numbers, by name."""
        own = {"feedback": self.reward, "thumbs": None if self.thumbs is None else float(self.thumbs == "up")}
        return {**self.parts, **{name: value for name, value in own.items() if value is not None}}

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.call is None and self.session is None and self.trace is None:
            raise ValueError("names neither a call nor a session nor a trace")
        if self.call is not None and self.trace is not None:
            raise ValueError("names a call and a trace: a trace means its last call")
        if not self.rewards and self.correction is None and self.note is None:
            raise ValueError("says nothing: give reward, parts, thumbs, correction or note")
        for name in ("feedback", "thumbs"):
            if name in self.parts:
                raise ValueError(f"a part cannot be called '{name}', which has a field of its own")
        return self


class FeedbackReply(Body):
    """What the feedback was joined with."""

    session: str
    call: str | None = Field(description="Of a trace its last one; null: it is about the whole session.")
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

OPERATIONS: tuple[AnyOperation, ...] = (BEGIN_SESSION, END_SESSION, FEEDBACK, DELETE_SESSIONS)
