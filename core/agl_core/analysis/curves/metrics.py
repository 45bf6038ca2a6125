"""The numbers of a run (docs/metrics.md), as its folder has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from agl_core.training.checkpoints import HEADLINE_SET
from agl_core.training.metrics import METRICS_FILE

_REWARD = "/reward/mean"


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The numbers of one training step or of one evaluation."""

    step: int
    kind: str
    """`train` or `eval`."""
    values: Mapping[str, float]

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
    """The lines of a run's metrics, in their order; the last one may be incomplete, and is then left out."""
    file, found = folder / METRICS_FILE, []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            read = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(read, dict) and isinstance(read.get("step"), int) and isinstance(read.get("kind"), str):
            values = {key: float(value) for key, value in read.items() if type(value) in (int, float)}
            found.append(MetricsLine(read["step"], read["kind"], values))
    return found


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
