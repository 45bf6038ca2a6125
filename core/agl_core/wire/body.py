"""The base of every request's and reply's body, and the limits of its size."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_BODY = 8 << 20
"""Bytes of a request's body."""


class Body(BaseModel):
    """A request's or a reply's body; a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Empty(Body):
    """An empty body. As a reply: the request was carried out, and its records are in the store."""


class Problem(Body):
    """What was wrong with a request."""

    message: str = Field(description="What, where, and what to do.")
    type: str
    code: str | None = None


class ErrorReply(Body):
    """The body of every reply that is not a success."""

    error: Problem
