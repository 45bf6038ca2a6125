"""The Store: what was recorded of every run, durable, with one writer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, Self, TypeAlias, TypedDict, Unpack

from agl_core.types import (
    Annotation,
    Attempt,
    AttemptKey,
    Call,
    Ending,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    ToolResult,
    TrainingRecord,
)

Record: TypeAlias = Run | Rollout | Attempt | Call | ToolResult | Reward | TrainingRecord | Annotation


class RolloutFilter(TypedDict, total=False):
    """Rollouts that match every value that is not None."""

    run: str | None
    step: int | None
    mode: Mode | None
    state: RolloutState | None
    group: str | None
    after: str | None
    """First recorded after the rollout of this id: with `limit`, the next page of a list."""
    before: str | None
    """First recorded before it: with `newest`, the page before."""
    limit: int | None
    newest: int | None
    """How many of the last ones, oldest first all the same."""
    words: Sequence[str] | None
    """Words of ASCII letters and digits in one text of a rollout, in any case. A store may return others too."""


class Store(Protocol):
    """One interface for every store. All methods may be called from one event loop, concurrently."""

    failure: Exception | None
    """Why the latest write failed that did."""

    async def open(self) -> None:
        """Open or create it. StoreError says what to do if it cannot."""

    async def close(self) -> None:
        """Finish what was accepted and close."""

    async def put(self, *records: Record) -> None:
        """Write records, all or none; when this returns they survive the kill of any process.

        A record replaces an earlier one with its key (a rollout changes its state), except that the first annotation
        of an id stands, and the first tool result of an id from one source: a later one only fills in a tool_call_id,
        an agent or a parent_span that it lacks. Concurrent calls are committed together. A call that is cancelled
        before that writes nothing, here and below.
        """

    async def claim(self, worker: str, count: int, renewals: int) -> list[tuple[Rollout, Attempt]]:
        """Lease up to `count` waiting rollouts, oldest first; no other claim gets them.

        They are running then, each with a new attempt, whose lease counts as renewed so many times.
        """

    async def renew(self, worker: str, attempts: Collection[AttemptKey]) -> set[AttemptKey]:
        """Renew the leases of these attempts, and all of the worker that never were; returns those still leased."""

    async def end(self, attempt: AttemptKey, *records: Record) -> bool:
        """End the lease of an attempt, and write these records; False, and nothing is written, if it has ended."""

    async def cancel_waiting(self, ids: Collection[str], ending: Ending) -> tuple[int, list[AttemptKey]]:
        """End the waiting rollouts of these; returns their number, and the attempts of the leased ones."""

    async def leases(self) -> tuple[int, dict[AttemptKey, int]]:
        """The number of rollouts that wait, and how often each lease was renewed."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """The rollouts of these ids that are done, in the order in which they were first recorded."""

    async def runs(self) -> list[Run]:
        """Every restart of every run, oldest first."""

    async def rollouts(self, **wanted: Unpack[RolloutFilter]) -> list[Rollout]:
        """Rollouts that match, oldest first."""

    async def rollout(self, prefix: str) -> Rollout:
        """The rollout whose id starts with `prefix`; StoreError if there is none or more than one."""

    async def attempts(self, *rollouts: str) -> list[Attempt]:
        """Every attempt of these rollouts: by rollout as asked, then in order."""

    async def calls(self, attempts: Iterable[AttemptKey], ids: Collection[str] | None = None) -> list[Call]:
        """The calls of these attempts, each attempt's in the order they started; with `ids`, only those."""

    async def tool_results(self, attempts: Iterable[AttemptKey]) -> list[ToolResult]:
        """The tool results of these attempts, in the order they were recorded."""

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        """The rewards of these attempts, with provenance."""

    async def training_records(self, attempts: Iterable[AttemptKey]) -> list[TrainingRecord]:
        """The training records of these attempts' transitions."""

    async def annotations(self, attempts: Iterable[AttemptKey]) -> list[Annotation]:
        """The annotations of these attempts, in the order in which they were recorded."""

    async def erase(self, ids: Iterable[str]) -> int:
        """Remove all records of these rollouts for good; returns how many rollouts there were.

        All these ids are remembered. Nothing that another rollout shares is lost.
        """

    async def erased(self, ids: Iterable[str]) -> set[str]:
        """The ids among these that were erased."""

    async def ended_before(self, mode: Mode, moment: float) -> list[str]:
        """The rollouts of this mode whose last attempt ended before this moment, in Unix seconds."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
