"""The rewards of each step of a run, which are read once: what a step that is over recorded stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agl_core.analysis.groups import StepRewards, step_rewards
from agl_core.store.interface import Store

_FEW = 8
"""A page waits for so many steps in any case."""
_PATIENCE = 0.25
"""Seconds for which it waits for the others. What was not read until then comes with its next version."""


@dataclass
class _Known:
    restarts: int = 0
    steps: dict[int, StepRewards] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    reading: asyncio.Task[None] | None = None


class RewardsOfSteps:
    """Of each run, by its folder; `open_store` opens its store."""

    def __init__(self, open_store: Callable[[Path], Store]) -> None:
        self._open_store = open_store
        self._known: dict[Path, _Known] = {}

    def mark(self, folder: Path) -> str:
        """A text that is another one once more was read."""
        return str(len(self._known[folder].steps)) if folder in self._known else ""

    async def read(
        self, folder: Path, trained: Collection[int], first: int | None
    ) -> tuple[Mapping[int, StepRewards], bool]:
        """What is known of the steps that were `trained` and of the one under way, and whether that is all of it.

        `first` is read first, else the last one is. Raises what opening or reading the store does.
        """
        known = self._known.setdefault(folder, _Known())
        task = known.reading
        if task is None or task.done():
            task = known.reading = asyncio.create_task(_read(self._open_store(folder), known, set(trained), first))
        await asyncio.wait({task}, timeout=_PATIENCE)
        while not task.done() and len(known.over) < _FEW:
            await asyncio.wait({task}, timeout=0.05)
        if task.done():
            task.result()
        return dict(sorted(known.steps.items())), task.done()


async def _read(opened: Store, known: _Known, trained: set[int], first: int | None) -> None:
    async with opened as store:
        restarts = len(await store.runs())
        if restarts != known.restarts:  # It may have superseded steps.
            known.restarts = restarts
            known.steps.clear()
            known.over.clear()
        asked = [] if first is None else [first]
        under_way = max(trained, default=0) + 1
        for step in dict.fromkeys([*asked, *sorted({*trained, under_way} - known.over, reverse=True)]):
            if step in known.over:
                continue
            found = await step_rewards(store, step)
            if found.rewards:
                known.steps[step] = found
            if step in trained:
                known.over.add(step)
