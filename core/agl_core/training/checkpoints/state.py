"""What a run has done so far, besides its weights: saved in each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agl_core.errors import CheckpointError
from agl_core.types import Episode

HEADLINE_SET = "eval"
STATE_FILE = "state.json"
"""In each checkpoint; written last."""
PREFIX = "step-"


@dataclass
class RunState:
    """What a run has done so far; saved with every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    """Time spent, earlier restarts included."""
    groups_begun: int = 0
    """Groups of training rollouts."""
    groups_unfinished: list[int] = field(default_factory=list)
    """The positions, from 0, of begun groups that no step trained on: they are begun again."""
    llm_calls: int = 0
    passed_through: int = 0
    """Requests that were passed on and not recorded."""
    kept: int = 0
    """Transitions trained on."""
    without_advantage: int = 0
    """Those among them whose advantage was 0: only a KL term or a critic learned from them."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Transitions dropped, by reason."""
    endings: dict[str, int] = field(default_factory=dict)
    """The number of training rollouts by ending."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, set, mode, reward, rollouts, seconds."""
    train_rewards: list[float] = field(default_factory=list)
    """The mean reward of each step."""
    peak_rss_bytes: int = 0
    resets: list[list[int]] = field(default_factory=list)
    """After which step the weights went back to those of which earlier step: pairs, the earliest first."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration with which the last step was made."""

    def count_dropped(self, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            name = str(reason)  # JSON keys cannot be members of an enum.
            self.dropped[name] = self.dropped.get(name, 0) + count

    def count_endings(self, episodes: Iterable[Episode]) -> None:
        for episode in episodes:
            self.endings[episode.ending.value] = self.endings.get(episode.ending.value, 0) + 1


def read_state(checkpoint: Path) -> RunState:
    """What the run had done when this checkpoint was written."""
    try:
        return RunState(**orjson.loads((checkpoint / STATE_FILE).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}. {instead_of(checkpoint)}") from error


def headline(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations of the set `eval`, or else of the first set, in the first mode; oldest first."""
    sets = [e["set"] for e in evaluations]
    chosen = [e for e in evaluations if e["set"] == (HEADLINE_SET if HEADLINE_SET in sets else sets[0])]
    return [e for e in chosen if e["mode"] == chosen[0]["mode"]]


def complete_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/{STATE_FILE}"))


def instead_of(checkpoint: Path) -> str:
    """What to do if this checkpoint cannot be used."""
    earlier = [each for each in complete_in(checkpoint.parent) if each.name < checkpoint.name]
    if not earlier:
        return "Restore the checkpoint from a copy; there is no earlier one, so otherwise start a new run."
    return f"Restore the checkpoint from a copy, or go on from an earlier one: agl train --resume {earlier[-1]}."
