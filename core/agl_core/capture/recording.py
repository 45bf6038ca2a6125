"""What one attempt's agent reports besides its calls: tool outcomes, rewards, and what adapters could not do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from agl_core.types import Json, OutcomeStatus
from agl_core.wire import OutcomeReport, RewardReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call that a response asked for."""

    tool_call_id: str
    tool: str
    arguments: Json = None
    agent: str | None = None
    """Whose response it was."""


class Recording:
    """Collects the reports of one attempt, from any thread, until it is closed.

    A report that comes after `close` is counted in `late` and not kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[str, OutcomeReport] = {}
        self._rewards: list[RewardReport] = []
        self._problems: dict[str, None] = {}
        self._requests: dict[str, ToolRequest] = {}
        self._answered: set[str] = set()
        self._late = 0
        self._closed = False

    @property
    def outcomes(self) -> tuple[OutcomeReport, ...]:
        """What the tools did, in the order reported; an id reported twice counts once."""
        with self._lock:
            return tuple(self._outcomes.values())

    @property
    def rewards(self) -> tuple[RewardReport, ...]:
        """The rewards that the agent reported, in order."""
        with self._lock:
            return tuple(self._rewards)

    @property
    def problems(self) -> tuple[str, ...]:
        """What adapters could not do, each once; the agent went on without them."""
        with self._lock:
            return tuple(self._problems)

    @property
    def late(self) -> int:
        """How many reports came after the attempt had ended."""
        return self._late

    def outcome(self, report: OutcomeReport) -> None:
        """Keep what a tool did; the first report of an id counts."""
        with self._lock:
            if self._closed:
                self._late += 1
                return
            self._outcomes.setdefault(report.id, report)
            if report.tool_call_id is not None:
                self._answered.add(report.tool_call_id)

    def reward(self, report: RewardReport) -> None:
        """Keep a reward that the agent reports."""
        with self._lock:
            if self._closed:
                self._late += 1
            else:
                self._rewards.append(report)

    def problem(self, text: str) -> bool:
        """Keep what an adapter could not do, even after the end; True if it is new."""
        with self._lock:
            is_new = text not in self._problems
            self._problems[text] = None
            return is_new

    def asked(self, request: ToolRequest) -> None:
        """Remember that a response asked for a tool, so that its outcome can be told from older ones."""
        with self._lock:
            if not self._closed:
                self._requests[request.tool_call_id] = request
                self._answered.discard(request.tool_call_id)

    def request(self, tool_call_id: str) -> ToolRequest | None:
        """The request with this id, if a response of this attempt made it."""
        with self._lock:
            return self._requests.get(tool_call_id)

    def unanswered(self, tool_call_id: str) -> ToolRequest | None:
        """The request with this id, if no outcome was reported for it yet."""
        with self._lock:
            return None if tool_call_id in self._answered else self._requests.get(tool_call_id)

    def close(self) -> None:
        """The attempt has ended; closing it again changes nothing."""
        with self._lock:
            self._closed = True


def status_of(result: Any) -> OutcomeStatus:
    """What became of a tool call, by what it returned or raised.

    An exception that was raised from a timeout is a timeout.

    >>> [str(status_of(each)) for each in (7, "", [], ValueError(), TimeoutError())]
    ['ok', 'empty', 'empty', 'error', 'timeout']
    """
    if isinstance(result, BaseException):
        return OutcomeStatus.TIMEOUT if _is_timeout(result) else OutcomeStatus.ERROR
    if result is None:
        return OutcomeStatus.EMPTY
    if isinstance(result, str | bytes | Mapping | Sequence | Set) and len(result) == 0:
        return OutcomeStatus.EMPTY
    return OutcomeStatus.OK


def _is_timeout(error: BaseException) -> bool:
    # HTTP clients and subprocess have timeouts that are no TimeoutError; agl must not import them to know them.
    names = (kind.__name__ for kind in type(error).__mro__)
    if isinstance(error, TimeoutError) or any("Timeout" in name for name in names):
        return True
    return error.__cause__ is not None and _is_timeout(error.__cause__)


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, as records keep it."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:2000] if text else type(error).__name__
