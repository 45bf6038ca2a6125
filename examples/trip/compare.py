"""How fast runs of this example learned, side by side.

    python examples/trip/compare.py runs/trip runs/trip-2

Steps and seconds are counted to the first training step from which the mean over three steps is at least so high. The
rollouts of a step are those before its update.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WINDOW = 3
THRESHOLDS = (0.77, 0.90)
MEASURES = {"memory first": "reward/memory_first", "reward": "reward/mean"}


@dataclass(frozen=True)
class Reached:
    """When a threshold was reached."""

    step: int
    seconds: float
    """Of training, evaluations left out."""


def reached(values: Sequence[float], seconds: Sequence[float], threshold: float) -> Reached | None:
    """The first step at whose end the mean of the last `WINDOW` values is at least `threshold`.

    >>> reached([0.5, 0.8, 0.8, 0.8], [1.0, 1.0, 1.0, 1.0], 0.77)
    Reached(step=4, seconds=4.0)
    """
    for end in range(WINDOW, len(values) + 1):
        if sum(values[end - WINDOW : end]) / WINDOW >= threshold:
            return Reached(end, sum(seconds[:end]))
    return None


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The metrics of a run's training steps or evaluations."""
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in written if line["kind"] == kind]


def rows(run: Path) -> list[tuple[str, ...]]:
    """One row for each measure: before and after on held-out trips, and when the thresholds were reached."""
    trained, evaluated = lines(run, "train"), lines(run, "eval")
    seconds = [line["seconds/step"] for line in trained]
    made = []
    for name, key in MEASURES.items():
        before, after = (f"{line[f'eval/sampled/{key}']:.3f}" for line in (evaluated[0], evaluated[-1]))
        values = [line[key] for line in trained]
        when = [reached(values, seconds, threshold) for threshold in THRESHOLDS]
        made.append((run.name, name, before, after, *(f"{r.step} ({r.seconds:.0f} s)" if r else "-" for r in when)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast runs of this example learned, side by side.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    columns = ("run", "measure", "before", "after", *(f"steps to {threshold:.2f}" for threshold in THRESHOLDS))
    table = Table(*columns)
    for run in parser.parse_args().runs:
        for row in rows(run):
            table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
