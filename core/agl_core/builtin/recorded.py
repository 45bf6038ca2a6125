"""Rollouts that another run recorded, as tasks: the task source "recorded"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import ConfigError
from agl_core.kinds import Capability
from agl_core.store.interface import Store
from agl_core.types import AttemptKey, Mode, RecordedRollout, Rollout, RolloutState, Task

_PAGE = 1000
"""Rollouts that are looked at together."""


class RecordedOptions(BaseModel):
    """The run, and which of its rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: Path = Field(
        description="The folder of the run, as `agl import`, `agl run` or `agl train` made it, relative "
        "to the configuration file."
    )
    split: str | None = Field(
        None,
        description="Only tasks of this split; absent: those of training if the run trained, otherwise all.",
    )
    without_logprobs: bool = Field(
        False,
        description="Train also on calls whose log-probabilities are not known, as if the policy itself had "
        "sampled them: there are no importance weights. Calls without token ids, or with those of another model, are "
        "tokenised by the policy's own chat template. Otherwise they are dropped and counted.",
    )


@dataclass
class _Group:
    task: Task
    rollouts: list[str] = field(default_factory=list)


class Recorded:
    """The tasks of a recorded run with their rollouts; see `agl_core.protocols.RecordedTasks`."""

    def __init__(self, options: RecordedOptions, folder: Path) -> None:
        """Read which rollouts there are. ConfigError if there is no such run, or it has none."""
        self._run = folder / options.run.expanduser()
        if not (self._run / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{self._run} is not a run's folder (it has no {CONFIG_FILE}). Make one of a file with `agl import`; "
                f"paths are relative to the configuration file, or to its `folder`."
            )
        self.without_logprobs = options.without_logprobs
        with ThreadPoolExecutor(1) as thread:  # In this thread an event loop may be running.
            self._groups = thread.submit(asyncio.run, self._read(options.split)).result()
        if not self._groups:
            which = "that is done" if options.split is None else f"of the split '{options.split}' that is done"
            raise ConfigError(f"The run {self._run} has no rollout {which}, so there is nothing to train on.")

    @property
    def size(self) -> int:
        return len(self._groups)

    def task(self, index: int) -> Task:
        """The task at this index, in the order in which their first rollouts were recorded."""
        return self._groups[index].task

    def members(self, index: int) -> int:
        """How many rollouts there are of the task at this index."""
        return len(self._groups[index].rollouts)

    async def recorded(self, wanted: Sequence[tuple[int, int]]) -> list[RecordedRollout]:
        """These rollouts, each by the index of its task and its number there."""
        # Agents' processes register components too, and need nothing that reads runs.
        from agl_core.reading.rollouts import entries_of
        from agl_core.reading.runs import open_store

        async with open_store(self._run) as store:
            rollouts = [await store.rollout(self._groups[index].rollouts[number]) for index, number in wanted]
            entries = await entries_of(store, rollouts)
            return [await _recorded(store, entry.rollout, entry.reward) for entry in entries]

    async def _read(self, split: str | None) -> list[_Group]:
        from agl_core.reading.explained import is_superseded
        from agl_core.reading.runs import open_store

        groups: dict[tuple[Mode, str, str], _Group] = {}
        after = None
        async with open_store(self._run) as store:
            runs = await store.runs()
            while page := await store.rollouts(state=RolloutState.DONE, after=after, limit=_PAGE):
                after = page[-1].id
                for rollout in page:
                    wanted = split is None or rollout.task.split == split
                    if wanted and rollout.counted_attempt is not None and not is_superseded(rollout, runs):
                        key = (rollout.mode, rollout.task.split, rollout.group)
                        groups.setdefault(key, _Group(rollout.task)).rollouts.append(rollout.id)
        has_trained = any(mode.trains for mode, _, _ in groups)
        return [group for (mode, _, _), group in groups.items() if split or not has_trained or mode.trains]


async def _recorded(store: Store, rollout: Rollout, terminal: float | None) -> RecordedRollout:
    attempt = next(a for a in await store.attempts(rollout.id) if a.attempt == rollout.counted_attempt)
    keys = [AttemptKey(rollout.id, attempt.attempt)]
    calls, tool_results = await store.calls(keys), await store.tool_results(keys)
    return RecordedRollout(rollout, attempt, calls, tool_results, await store.rewards(keys), terminal)


def recorded(options: RecordedOptions, folder: Path, seed: int) -> Recorded:
    """Rollouts that another run recorded, to train on instead of running the agent."""
    del seed  # A run is the same for every seed.
    return Recorded(options, folder)


def recorded_needs(options: RecordedOptions) -> set[Capability]:
    """An engine that tokenises, where texts are trained on."""
    return {Capability.RECORDED_TEXTS} if options.without_logprobs else set()
