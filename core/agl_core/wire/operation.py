"""One request that a Lightning Server answers below /agl/v1.

Each is an `Operation`: those of workers are in `agl_core.wire.workers`, a source of rollouts may bring others. The
server's routes, its OpenAPI document and the clients are made of these descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Asked = TypeVar("Asked", bound=BaseModel)
Answer = TypeVar("Answer", bound=BaseModel)

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


class Right(StrEnum):
    """Whose key a request needs."""

    WORKER = "worker"
    OPERATOR = "operator"
    EITHER = "worker or operator"
    LEASE = "lease"
    """The secret of the lease of the attempt that the path names."""


REFUSALS: Mapping[int, str] = {
    401: "The key is missing, or is not the right one.",
    413: "The body is too large.",
    422: "The body is not as described; the message names the place.",
    431: "There are too many headers, or too long ones.",
    503: "The store failed, or the server is stopping: the same request may succeed later.",
}
"""The errors that every request may get."""


@dataclass(frozen=True, eq=False)
class Operation(Generic[Asked, Answer]):
    """A request's method, path, key and bodies."""

    name: str
    method: str
    path: str
    """`{rollout}` and `{attempt}` in it name an attempt."""
    right: str
    """A `Right`, or the name of one that a source of rollouts grants."""
    body: type[Asked]
    """`Empty`: no body is read."""
    reply: type[Answer]
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Errors that it may get besides `REFUSALS`."""
    largest: int = MAX_BODY
    """Bytes of the request's body."""
    waits: bool = False
    """Whether the reply may wait for something; then the server stops when the client goes away."""

    @property
    def summary(self) -> str:
        """What it does, for the documentation: the first line of the request's docstring."""
        described = self.body if self.has_body else self.reply
        return (described.__doc__ or "").partition("\n")[0]

    @property
    def has_body(self) -> bool:
        return self.body is not Empty


AnyOperation: TypeAlias = Operation[Any, Any]
