"""Which call a tool belongs to when nothing but the program's own order says so.

An agent written from scratch asks the model, runs what the reply asks for, and asks again: each call begins a step,
and the tools that run in it are that call's. The step's span is stamped on the call as its parent span, and reported
as that of the tools. Where calls of one scope overlap, a tool belongs to the call of its own task; where that does
not say, to none: no join is guessed.
"""

from __future__ import annotations

import threading
import uuid
from contextvars import ContextVar


def new_span() -> str:
    """A span id in OpenTelemetry's form."""
    return uuid.uuid4().hex[:16]


class Step:
    """A call, and what follows until the next one."""

    __slots__ = ("_is_running", "followed", "span", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps, self.span = steps, new_span()
        self.followed = False
        """Whether a context that inherited this step has begun another."""
        self._is_running = True

    def end_call(self) -> None:
        """The call has its reply, or failed; what was said twice counts once."""
        if self._is_running:
            self._is_running = False
            self.steps.ended()


_step: ContextVar[Step | None] = ContextVar("agl_step", default=None)


def current_step() -> Step | None:
    """The step that this context is in, of whatever scope."""
    return _step.get()


def set_step(step: Step | None) -> None:
    """Go back to a step, or forget it, when the scope that it was left for has ended."""
    _step.set(step)


class Steps:
    """The steps of one scope (an agent's run, or a tool's)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._elsewhere: Step | None = None
        """The latest whose call was made in a task or thread of its own, as `asyncio.wait_for` does."""
        self._is_ambiguous = False

    def begin(self) -> Step:
        """A call is sent from here."""
        step, before = Step(self), self._here()
        with self._lock:
            if before is not None:
                before.followed = True
            else:
                self._is_ambiguous |= self._running > 0
                self._elsewhere = step
            self._running += 1
        _step.set(step)
        return step

    def ended(self) -> None:
        """One of the calls has ended."""
        with self._lock:
            self._running -= 1

    def span(self) -> str | None:
        """The span of the step that a tool run here belongs to; None before any call, and where it is not clear."""
        here = self._here()
        if here is not None:
            return None if here.followed else here.span
        return self._elsewhere.span if self._elsewhere is not None and not self._is_ambiguous else None

    def _here(self) -> Step | None:
        step = _step.get()
        return step if step is not None and step.steps is self else None
