"""Checkpoints: whole or not there at all, and what a run has to remember besides its weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agl_core.errors import CheckpointError

_STATE = "state.json"
_PREFIX = "step-"


@dataclass
class RunState:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Time spent, earlier incarnations included."""
    groups_begun: int = 0
    """Groups of training rollouts."""
    groups_unfinished: list[int] = field(default_factory=list)
    """Which of them, counted from 0, no step trained on: they are begun again."""
    llm_calls: int = 0
    kept: int = 0
    """Transitions trained on."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Transitions left out, by reason."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, set, mode, reward, rollouts, seconds."""
    train_rewards: list[float] = field(default_factory=list)
    """The mean reward of each step."""
    peak_rss_bytes: int = 0

    def count_dropped(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            name = str(reason)  # A member of an enum is no key of JSON.
            self.dropped[name] = self.dropped.get(name, 0) + count


class Checkpoints:
    """The checkpoints of one run, in `folder/step-N`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write into; it becomes the checkpoint by `commit`."""
        part = self.folder / f".{_PREFIX}{step:06d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def commit(self, part: Path, state: RunState) -> Path:
        """Make what was written the checkpoint of `state.step`, and remove those that are too old."""
        (part / _STATE).write_bytes(orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2))
        target = self.path(state.step)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"{_PREFIX}*/{_STATE}"))

    def latest(self) -> Path:
        found = self.all()
        if not found:
            raise CheckpointError(f"{self.folder} holds no checkpoint, so there is nothing to resume from. Train anew.")
        return found[-1]


def read_state(checkpoint: Path) -> RunState:
    """What the run had done when this checkpoint was written."""
    try:
        return RunState(**orjson.loads((checkpoint / _STATE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / _STATE} cannot be read: {error}. Resume from an earlier one.") from error
