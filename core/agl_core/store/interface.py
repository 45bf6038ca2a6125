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


class Wanted(TypedDict, total=False):
    """Which rollouts: those that have every value that is given and not None."""

    run: str | None
    step: int | None
    mode: Mode | None
    state: RolloutState | None
    group: str | None
    after: str | None
    """Those that were first recorded after the rollout of this id: with `limit`, the next page of a list."""
    before: str | None
    """Those that were first recorded before it: with `newest`, the page before."""
    limit: int | None
    """The first so many."""
    newest: int | None
    """The last so many, oldest first all the same."""
    words: Sequence[str] | None
    """Words of ASCII letters and digits that stand in one text of a rollout, upper and lower case alike: a store leaves
    out what it knows to lack them, and may return others."""


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

        A record with the key of an earlier one replaces it (a rollout changes its state), except that the first
        tool result of an id from one source stands: a later one only fills in a tool_call_id, an agent or a parent_span
        that it left open. Writing the same record twice changes nothing. Concurrent calls are committed together; what
        is cancelled before that is not written, here and below.
        """

    async def claim(self, worker: str, count: int, renewals: int) -> list[tuple[Rollout, Attempt]]:
        """Lease up to `count` rollouts that wait, the oldest first; no other claim gets them.

        They are running then, with a new attempt each, and the lease counts as renewed so many times.
        """

    async def renew(self, worker: str, attempts: Collection[AttemptKey]) -> set[AttemptKey]:
        """Renew the leases of these attempts, and all of the worker that never were; returns those still leased."""

    async def end(self, attempt: AttemptKey, *records: Record) -> bool:
        """End the lease of an attempt, and write these records; False, and nothing is written, if it has ended."""

    async def withdraw(self, ids: Collection[str], ending: Ending) -> tuple[int, list[AttemptKey]]:
        """End those of these rollouts that wait; returns how many did, and the attempts of those that are leased."""

    async def leases(self) -> tuple[int, dict[AttemptKey, int]]:
        """The number of rollouts that wait, and how often each lease was renewed."""

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        """Those of these rollouts that are done, those that were recorded first."""

    async def runs(self) -> list[Run]:
        """Every restart of every run, oldest first."""

    async def rollouts(self, **wanted: Unpack[Wanted]) -> list[Rollout]:
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
        """Remove everything that was recorded of these rollouts, for good; returns how many of them there were.

        The ids are remembered, also those of which there is no rollout. Nothing that another rollout shares is lost.
        """

    async def erased(self, ids: Iterable[str]) -> set[str]:
        """Those of these ids that were erased."""

    async def ended_before(self, mode: Mode, moment: float) -> list[str]:
        """The rollouts of this mode whose last attempt ended before this moment, in Unix seconds."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
