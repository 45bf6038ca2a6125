"""Where the code that is running belongs: which attempt, and which agent speaks.

Both are context variables, so that an agent made once at import and shared by concurrent rollouts is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from agl_core.capture.recording import Recording
from agl_core.types import Identity


@dataclass(frozen=True, slots=True, eq=False)
class ActiveAttempt:
    """The attempt that the current context runs."""

    rollout: str
    attempt: int
    base_url: str
    """The root of the Lightning Server, `http://127.0.0.1:8000` say; only requests below it are stamped."""
    api_key: str
    """What the agent's client sends as its bearer token."""
    recording: Recording
    """Where its outcomes and rewards are collected."""


class IdentityScope:
    """The stretch in which an identity holds; the innermost open one counts.

    It is closed, not reset: a framework may report the end of a call from another task, thread or context than
    its start, where the token of a context variable is of no use.
    """

    __slots__ = ("_outer", "identity", "is_open")

    def __init__(self, identity: Identity, outer: IdentityScope | None) -> None:
        self.identity, self._outer, self.is_open = identity, outer, True

    def close(self) -> None:
        """End it, in every context that it reached; closing it again changes nothing."""
        self.is_open = False

    def innermost_open(self) -> IdentityScope | None:
        scope: IdentityScope | None = self
        while scope is not None and not scope.is_open:
            scope = scope._outer
        return scope


_attempt: ContextVar[ActiveAttempt | None] = ContextVar("agl_attempt", default=None)
_scope: ContextVar[IdentityScope | None] = ContextVar("agl_identity", default=None)


def current_attempt() -> ActiveAttempt | None:
    """The attempt that this context runs; None outside any rollout."""
    return _attempt.get()


@contextmanager
def running(active: ActiveAttempt) -> Iterator[None]:
    """Everything inside, and every task or thread it starts, belongs to this attempt."""
    token = _attempt.set(active)
    try:
        yield
    finally:
        _attempt.reset(token)


def current_identity() -> Identity | None:
    """Who makes a call that is sent now; None if nobody said so."""
    scope = _scope.get()
    scope = scope and scope.innermost_open()
    return scope.identity if scope else None


def enter_identity(identity: Identity) -> IdentityScope:
    """From now on, in this context and those copied from it, `identity` makes the calls, until the scope is closed.

    An identity without an agent name keeps the name of the one around it.
    """
    scope = _scope.get()
    outer = scope and scope.innermost_open()
    if identity.agent is None and outer:
        identity = replace(identity, agent=outer.identity.agent)
    entered = IdentityScope(identity, outer)
    _scope.set(entered)
    return entered


@contextmanager
def identify(agent: str | None = None, *, span: str | None = None, parent_span: str | None = None) -> Iterator[None]:
    """Calls made inside are this agent's.

    >>> with identify("critic"):
    ...     current_identity().agent
    'critic'
    """
    scope = enter_identity(Identity(agent, span, parent_span))
    try:
        yield
    finally:
        scope.close()


@dataclass(frozen=True, slots=True)
class Carried:
    """Attempt and identity on their way into a thread, which does not inherit context variables by itself."""

    attempt: ActiveAttempt | None
    scope: IdentityScope | None

    @classmethod
    def here(cls) -> Carried:
        scope = _scope.get()
        return cls(_attempt.get(), scope and scope.innermost_open())

    @property
    def is_empty(self) -> bool:
        return self.attempt is None and self.scope is None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, this context has the attempt and the identity that were carried."""
        attempt, scope = _attempt.set(self.attempt), _scope.set(self.scope)
        try:
            yield
        finally:
            _attempt.reset(attempt)
            _scope.reset(scope)
