"""Rollouts that another run recorded, as tasks: the task source "recorded"."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import ConfigError
from agl_core.kinds import Capability
from agl_core.types import RecordedRollout, Task


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
        # Agents' processes register components too, and need nothing that reads runs.
        from agl_core.reading.rollouts import recorded_groups

        with ThreadPoolExecutor(1) as thread:  # In this thread an event loop may be running.
            groups = thread.submit(asyncio.run, recorded_groups(self._run)).result()
        if options.split is not None:
            groups = [group for group in groups if group[0].task.split == options.split]
        elif any(group[0].mode.trains for group in groups):
            groups = [group for group in groups if group[0].mode.trains]
        self._groups = groups
        if not self._groups:
            which = "that is done" if options.split is None else f"of the split '{options.split}' that is done"
            raise ConfigError(f"The run {self._run} has no rollout {which}, so there is nothing to train on.")

    @property
    def size(self) -> int:
        return len(self._groups)

    def task(self, index: int) -> Task:
        """The task at this index, in the order in which their first rollouts were recorded."""
        return self._groups[index][0].task

    def members(self, index: int) -> int:
        """How many rollouts there are of the task at this index."""
        return len(self._groups[index])

    async def recorded(self, wanted: Sequence[tuple[int, int]]) -> list[RecordedRollout]:
        """These rollouts, each by the index of its task and its number there."""
        from agl_core.reading.rollouts import read_recorded

        return await read_recorded(self._run, [self._groups[index][number] for index, number in wanted])


def recorded(options: RecordedOptions, folder: Path, seed: int) -> Recorded:
    """Rollouts that another run recorded, to train on instead of running the agent."""
    del seed  # A run is the same for every seed.
    return Recorded(options, folder)


def recorded_needs(options: RecordedOptions) -> set[Capability]:
    """An engine that tokenises, where texts are trained on."""
    return {Capability.RECORDED_TEXTS} if options.without_logprobs else set()
