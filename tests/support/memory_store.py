"""A Store in memory: its writes take no thread, and a test can hold them up or let them fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store.interface import Record, Store
from agl_core.types import (
    Annotation,
    Attempt,
    AttemptKey,
    Call,
    Ending,
    Reward,
    Rollout,
    RolloutState,
    Run,
    ToolResult,
    TrainingRecord,
)

Kind = TypeVar("Kind")


class MemoryStore(Store):
    """Clear `writable` to make writes wait; set `failing` to make them fail. `written` are all writes, in order."""

    def __init__(self) -> None:
        self.written: list[Record] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.write_waits = asyncio.Event()
        self.failing = False
        self._leases: dict[AttemptKey, tuple[str, int]] = {}
        """Worker, and renewals."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, *records: Record) -> None:
        await self._wait_until_writable()
        self.written.extend(records)

    async def _wait_until_writable(self) -> None:
        if not self.writable.is_set():
            self.write_waits.set()
        await self.writable.wait()
        if self.failing:
            raise StoreError("scripted failure")

    async def claim(self, worker: str, count: int, renewals: int) -> list[tuple[Rollout, Attempt]]:
        await self._wait_until_writable()
        claimed = []
        for waiting in (await self.rollouts(state=RolloutState.QUEUED))[:count]:
            attempt = Attempt(waiting.id, len(await self.attempts(waiting.id)), worker, time.time())
            claimed.append((replace(waiting, state=RolloutState.RUNNING), attempt))
            self.written.extend(claimed[-1])
            self._leases[attempt.key] = worker, renewals
        return claimed

    async def renew(self, worker: str, attempts: Collection[AttemptKey]) -> set[AttemptKey]:
        await self._wait_until_writable()
        for key, (holder, renewals) in self._leases.items():
            if key in attempts or (holder == worker and not renewals):
                self._leases[key] = holder, renewals + 1
        return set(attempts) & self._leases.keys()

    async def end(self, attempt: AttemptKey, *records: Record) -> bool:
        await self._wait_until_writable()
        if self._leases.pop(attempt, None) is None:
            return False
        self.written.extend(records)
        return True

    async def withdraw(self, ids: Collection[str], ending: Ending) -> tuple[int, list[AttemptKey]]:
        await self._wait_until_writable()
        waiting = [rollout for rollout in await self.rollouts(state=RolloutState.QUEUED) if rollout.id in ids]
        self.written.extend(replace(rollout, state=RolloutState.DONE, ending=ending) for rollout in waiting)
        return len(waiting), [key for key in self._leases if key.rollout in ids]

    async def leases(self) -> tuple[int, dict[AttemptKey, int]]:
        waiting = len(await self.rollouts(state=RolloutState.QUEUED))
        return waiting, {key: renewals for key, (_, renewals) in self._leases.items()}

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        return [rollout for rollout in await self.rollouts(state=RolloutState.DONE) if rollout.id in ids]

    def _latest(self, kind: type[Kind], key: Callable[[Any], object]) -> list[Kind]:
        """The records of a kind, each as it was written last, in the order in which they came."""
        return list({key(record): record for record in self.written if isinstance(record, kind)}.values())

    def _of(self, kind: type[Kind], attempts: Iterable[AttemptKey]) -> list[Kind]:
        wanted = set(attempts)
        return [record for record in self._all(kind) if (record.rollout, record.attempt) in wanted]

    def _all(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.written if isinstance(record, kind)]

    async def runs(self) -> list[Run]:
        return self._all(Run)

    async def rollouts(self, **wanted: Any) -> list[Rollout]:
        rollouts = self._latest(Rollout, lambda rollout: rollout.id)
        return [one for one in rollouts if all(value in (None, getattr(one, key)) for key, value in wanted.items())]

    async def rollout(self, prefix: str) -> Rollout:
        for rollout in self._latest(Rollout, lambda rollout: rollout.id):
            if rollout.id == prefix:
                return rollout
        raise StoreRefusedError(f"No rollout has the id {prefix!r}.")

    async def attempts(self, *rollouts: str) -> list[Attempt]:
        attempts = self._latest(Attempt, lambda attempt: attempt.key)
        return [attempt for id in dict.fromkeys(rollouts) for attempt in attempts if attempt.rollout == id]

    async def calls(self, attempts: Iterable[AttemptKey]) -> list[Call]:
        wanted = set(attempts)
        calls = [call for call in self._latest(Call, lambda call: call.id) if call.key in wanted]
        return sorted(calls, key=lambda call: call.sequence)

    async def tool_results(self, attempts: Iterable[AttemptKey]) -> list[ToolResult]:
        return self._of(ToolResult, attempts)

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        return self._of(Reward, attempts)

    async def annotations(self, attempts: Iterable[AttemptKey]) -> list[Annotation]:
        return self._of(Annotation, attempts)

    async def erased(self, ids: Iterable[str]) -> set[str]:
        return set()

    async def training_records(self, attempts: Iterable[AttemptKey]) -> list[TrainingRecord]:
        return self._of(TrainingRecord, attempts)
