"""A Store in memory, whose writes a test can hold up or let fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from agl_core.errors import StoreError, StoreRefusedError
from agl_core.store.interface import Record
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Reward,
    Rollout,
    Run,
    ToolResult,
    TrainingRecord,
)


class MemoryStore:
    """Clear `writable` to make writes wait; set `failing` to make them fail. `written` are all writes, in order."""

    def __init__(self) -> None:
        self.written: list[Record] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.write_waits = asyncio.Event()
        self.failing = False
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[AttemptKey, Attempt] = {}
        self._calls: dict[str, Call] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, *records: Record) -> None:
        if not self.writable.is_set():
            self.write_waits.set()
        await self.writable.wait()
        if self.failing:
            raise StoreError("scripted failure")
        self.written.extend(records)
        for record in records:
            if isinstance(record, Rollout):
                self._rollouts[record.id] = record
            elif isinstance(record, Attempt):
                self._attempts[record.key] = record
            elif isinstance(record, Call):
                self._calls[record.id] = record

    async def runs(self) -> list[Run]:
        return [each for each in self.written if isinstance(each, Run)]

    async def rollouts(
        self,
        *,
        after: str | None = None,
        newest: int | None = None,
        limit: int | None = None,
        **wanted: Any,
    ) -> list[Rollout]:
        recorded = list(self._rollouts.values())
        if after is not None:
            recorded = recorded[list(self._rollouts).index(after) + 1 :] if after in self._rollouts else []
        found = [
            each for each in recorded if all(value in (None, getattr(each, name)) for name, value in wanted.items())
        ]
        return found[0 if newest is None else max(len(found) - newest, 0) :][:limit]

    async def rollout(self, prefix: str) -> Rollout:
        if prefix not in self._rollouts:
            raise StoreRefusedError(f"No rollout has the id {prefix!r}.")
        return self._rollouts[prefix]

    async def attempts(self, *rollouts: str) -> list[Attempt]:
        return [each for id in dict.fromkeys(rollouts) for each in self._attempts.values() if each.rollout == id]

    async def calls(self, attempts: Iterable[AttemptKey]) -> list[Call]:
        wanted = set(attempts)
        return sorted((each for each in self._calls.values() if each.key in wanted), key=lambda call: call.sequence)

    async def tool_results(self, attempts: Iterable[AttemptKey]) -> list[ToolResult]:
        wanted = set(attempts)
        return [e for e in self.written if isinstance(e, ToolResult) and (e.rollout, e.attempt) in wanted]

    async def rewards(self, attempts: Iterable[AttemptKey]) -> list[Reward]:
        wanted = set(attempts)
        return [e for e in self.written if isinstance(e, Reward) and (e.rollout, e.attempt) in wanted]

    async def training_records(self, attempts: Iterable[AttemptKey]) -> list[TrainingRecord]:
        return []

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(self, *_: Any) -> None: ...
