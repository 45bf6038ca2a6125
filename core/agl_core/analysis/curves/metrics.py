"""The numbers of a run (docs/metrics.md), as its folder has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from agl_core.training.alarms import Alarm
from agl_core.training.checkpoints import HEADLINE_SET
from agl_core.training.metrics import METRICS_FILE
from agl_core.types import AlarmName

_REWARD = "/reward/mean"


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The numbers of one training step or of one evaluation."""

    step: int
    kind: str
    """`train` or `eval`."""
    values: Mapping[str, float]
    alarms: Sequence[Alarm] = ()
    """Those that were raised since the line before."""

    @classmethod
    def parse(cls, text: bytes) -> MetricsLine:
        """A line that `MetricsLog.write` wrote. LookupError, TypeError, ValueError or AttributeError if it is none."""
        line = orjson.loads(text)
        values = {key: float(value) for key, value in line.items() if type(value) in (int, float)}
        alarms = [Alarm(**{**alarm, "name": AlarmName(alarm["name"])}) for alarm in line.get("alarms", ())]
        return cls(int(line["step"]), line["kind"], values, alarms)

    @property
    def headline_set(self) -> str | None:
        """Of an evaluation: the set `eval`, else the first one, and the first mode: `eval/greedy`."""
        sets = [key.removesuffix(_REWARD) for key in self.values if key.endswith(_REWARD)]
        return next((name for name in sets if name.startswith(f"{HEADLINE_SET}/")), sets[0] if sets else None)

    @property
    def headline(self) -> float | None:
        """The reward of the headline set."""
        return self.values.get(f"{self.headline_set}{_REWARD}")


def read_metrics(folder: Path) -> list[MetricsLine]:
    """The lines of a run's metrics, in their order; without those that cannot be read."""
    return read_lines(folder)[0]


def read_lines(folder: Path) -> tuple[list[MetricsLine], list[int]]:
    """The lines of a run's metrics, and the numbers, from 1 on, of those that cannot be read.

    A last line without its end does not count: it is being written, or a kill cut it off.
    """
    file = folder / METRICS_FILE
    lines, damaged = [], []
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), 1):
        try:
            lines.append(MetricsLine.parse(text))
        except (LookupError, TypeError, ValueError, AttributeError):
            if text.endswith(b"\n"):
                damaged.append(number)
    return lines, damaged


def series(lines: Sequence[MetricsLine], kind: str, key: str) -> list[tuple[int, float]]:
    """The values of a key, each with its step.

    >>> series([MetricsLine(1, "train", {"reward/mean": 0.5}), MetricsLine(1, "eval", {})], "train", "reward/mean")
    [(1, 0.5)]
    """
    return [(line.step, line.values[key]) for line in lines if line.kind == kind and key in line.values]


def held_out(lines: Sequence[MetricsLine]) -> dict[str, list[tuple[int, float]]]:
    """The mean reward of each held-out set and mode, as `eval/greedy`, each with the step it follows."""
    keys = dict.fromkeys(key for line in lines if line.kind == "eval" for key in line.values if key.endswith(_REWARD))
    return {key.removesuffix(_REWARD): series(lines, "eval", key) for key in keys}


def keys_below(lines: Sequence[MetricsLine], prefix: str) -> list[str]:
    """The keys of training steps that begin with `prefix`, in their alphabetical order."""
    return sorted({key for line in lines if line.kind == "train" for key in line.values if key.startswith(prefix)})
