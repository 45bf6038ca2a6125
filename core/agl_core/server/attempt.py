"""One leased attempt as queue and gateway share it: its states, and how its end is decided and recorded.

    rollout   queued ─▶ running ─▶ done          attempt   open ─▶ closing ─▶ counted
                 ▲         │                                  │        └────▶ superseded
                 └─────────┘ tried again                      └─▶ withdrawn

A rollout ends once; of its attempts at most one counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agl_core.server.answered import Answered
from agl_core.server.errors import NO_UPSTREAM, STOPPING, STORE_FAILED, UPSTREAM_GONE, ApiError
from agl_core.server.upstream import Answering
from agl_core.store.interface import Record, Store
from agl_core.types import Attempt, AttemptKey, Call, Ending, Mode, Reward, Rollout, ToolResult
from agl_core.wire.workers import CloseRequest

_TRIED_AGAIN = frozenset({Ending.CRASHED, Ending.TIMED_OUT})
_NO_CALL = (
    "The agent finished without one LLM call through agl, so there is nothing to learn from. Its LLM client does "
    "not use agl's base URL: let it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL (do not set base_url in code), or pass "
    "it `context.base_url` and `context.api_key`."
)
_INTERRUPTED = "The server, its store, or the model behind it was away while the agent ran, which may be why it failed:"
_NOT_AWAITED = "The agent finished before its first LLM call did: let it wait for the reply."


class AttemptState(StrEnum):
    """Where an attempt is in its life."""

    OPEN = "open"
    """A worker holds it, and its calls count."""
    CLOSING = "closing"
    """Its end is being written; a call that comes now does not count."""
    COUNTED = "counted"
    """Its rollout ended with it."""
    SUPERSEDED = "superseded"
    """Its rollout was tried again; what is still reported of it is recorded and does not count."""
    WITHDRAWN = "withdrawn"
    """Its start could not be written: no worker ever had it."""


@dataclass(slots=True, eq=False)
class ActiveAttempt:
    """An attempt that a worker holds. The gateway counts its calls here; after its end it stays known as closed."""

    rollout: Rollout
    record: Attempt
    deadline: float
    """Event loop time after which it counts as lost, whatever its worker says."""
    expires: float | None = None
    """Event loop time after which it counts as lost unless a heartbeat comes; None: its worker sends none."""
    state: AttemptState = AttemptState.OPEN
    started_calls: int = 0
    completed_calls: int = 0
    """Calls that were recorded while it was open."""
    asking: dict[int, float] = field(default_factory=dict)
    """Calls that wait for the model's reply, by their sequence: when they began."""
    last_answer: float | None = None
    """When the latest call was answered."""
    interrupted: bool = False
    """The server had no model for it, or could not record: if its agent breaks, that is why."""
    gone_after: int | None = None
    """How many calls were completed when the model server was gone last; None: it never was."""
    passed_through: dict[str, int] = field(default_factory=dict)
    """Requests that were passed on and not recorded, by route."""
    context_overflows: int = 0
    last_failure: str | None = None
    """The error of the last request that failed."""
    answered: Answered = field(default_factory=Answered)
    committing: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls that are being written; the end waits for them, so that an attempt's calls are in the store before it."""
    closing: asyncio.Task[None] | None = None
    """While its end is being written."""
    reported: Ending | None = None
    """The ending with which it was closed, as reported."""
    answered_by: Answering | None = None
    """What answers its calls; None: what answers those of the run."""

    @property
    def key(self) -> AttemptKey:
        return self.record.key

    @property
    def mode(self) -> Mode:
        return self.rollout.mode

    @property
    def closed(self) -> bool:
        """Whether its calls no longer count."""
        return self.state is not AttemptState.OPEN

    @property
    def over(self) -> bool:
        """Whether its end is recorded."""
        return self.state not in (AttemptState.OPEN, AttemptState.CLOSING)

    @property
    def due(self) -> float:
        """Event loop time after which it counts as lost."""
        return self.deadline if self.expires is None else min(self.expires, self.deadline)

    def next_sequence(self) -> int:
        """The start sequence of the call that begins now."""
        self.started_calls += 1
        return self.started_calls - 1

    @property
    def refuses_late(self) -> bool:
        """Whether its calls are refused once it is closed."""
        return True

    @property
    def reply_headers(self) -> Mapping[str, str]:
        """Headers that go onto each reply."""
        return {}

    def call_id(self, prefix: str) -> str:
        """The id of a new call, which begins as its API wants it."""
        return f"{prefix}{os.urandom(16).hex()}"

    async def keep(self, store: Store, *calls: Call) -> None:
        """Record calls, all or none. StoreError if that failed."""
        await store.put(*calls)

    async def delivered(self, arrived: bool) -> None:
        """A reply was sent; `arrived` says whether it reached the client."""

    def count_failure(self, error: ApiError) -> None:
        """A request of the agent got an error instead of a reply."""
        self.last_failure = error.message
        self.context_overflows += error.is_context_overflow
        self.interrupted |= error.code in (NO_UPSTREAM, STOPPING, STORE_FAILED)
        if error.code == UPSTREAM_GONE:
            self.gone_after = self.completed_calls


def attempt_key(rollout: str, number: str) -> AttemptKey | None:
    """The attempt that a path or a header names; None if it cannot be one.

    >>> attempt_key("r", "0"), attempt_key("r", "-1")
    (AttemptKey(rollout='r', attempt=0), None)
    """
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    return AttemptKey(rollout, int(number)) if rollout and is_number else None


def decided(attempt: ActiveAttempt, request: CloseRequest) -> tuple[Ending, str | None]:
    """The ending and error to record, from the worker's report and from what only the gateway knows."""
    ending, error = request.ending, request.error
    was_gone = attempt.gone_after == attempt.completed_calls  # A call that was answered since did not break the agent.
    if ending in _TRIED_AGAIN and (attempt.interrupted or was_gone):
        return Ending.LOST, f"{_INTERRUPTED} {error or ''}".rstrip()
    if ending is Ending.CRASHED and attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error
    if ending is not Ending.FINISHED or attempt.completed_calls:
        return ending, error
    if attempt.context_overflows:
        return Ending.CONTEXT_OVERFLOW, error or attempt.last_failure
    if attempt.last_failure:
        return Ending.NO_CALL, f"None of the agent's LLM calls got a reply. The last error was: {attempt.last_failure}"
    if attempt.started_calls:
        return Ending.NO_CALL, _NOT_AWAITED
    return Ending.NO_CALL, _NO_CALL + (f" It called {', '.join(request.bypassed)}." if request.bypassed else "")


def is_tried_again(attempt: ActiveAttempt, ending: Ending, budget: int) -> bool:
    """Whether the rollout gets another attempt: if this one was lost, or broke before the policy acted in it.

    An attempt in which the policy already acted is data. `budget` is the number of attempts a rollout may have.
    """
    if attempt.record.attempt + 1 >= budget:
        return False
    return ending is Ending.LOST or (ending in _TRIED_AGAIN and attempt.completed_calls == 0)


def reported(key: AttemptKey, request: CloseRequest) -> list[Record]:
    """The agent side's report of the attempt, as records; rewards of one name add up."""
    tool_results = [
        ToolResult(rollout=key.rollout, attempt=key.attempt, **report.model_dump()) for report in request.tool_results
    ]
    totals: dict[str, float] = {}
    for reward in request.rewards:
        totals[reward.name] = totals.get(reward.name, 0.0) + reward.value
    rewards = [Reward(*key, name=name, value=total, source="agent") for name, total in totals.items()]
    return [*tool_results, *rewards]
