"""Three steps of an engine, with a restart before the third, and how far apart serving and training are in each."""

from __future__ import annotations

import time

from agl_core.protocols import PolicySpec

from .engines import Make, Replies, started
from .parts import Setup, Table

COLUMNS = (
    "step", "tokens trained", "gradient norm", "served and trained, probabilities: largest difference", "mean",
    "update, s",
)  # fmt: skip
LARGEST_MEAN = 0.02
"""Difference of probabilities in serving and in training: rounding to bfloat16 explains less, a forgotten adapter makes
it many times as much."""
LORA = {"rank": 8, "alpha": 16.0, "dropout": 0.0}
RATE = 4e-3
"""At which two updates change a tiny policy so much that serving its base would be noticed."""


async def three_steps(make: Make, setup: Setup, spec: PolicySpec, wanted: Replies) -> Table:
    """Two updates, a checkpoint, another process that goes on from it, and a third update."""
    rows, beyond, saved = [], [], setup.folder / "checkpoint"
    for steps in ((1, 2), (3,)):
        async with started(make, setup.folder / f"run-{steps[0]}", spec) as running:
            if saved.exists():
                await running.engine.load(saved)
            for step in steps:
                batch = await running.batch(wanted)
                began = time.perf_counter()
                result = await running.update(batch)
                seconds, metrics = time.perf_counter() - began, result.metrics
                largest = metrics.get("rollout_probs_diff_max")
                rows.append(
                    (
                        f"{step}, resumed" if step == 3 else str(step),
                        f"{metrics['tokens_trained']:.0f}",
                        f"{metrics['grad_norm']:.2e}",
                        "-" if largest is None else f"{largest:.1e}",
                        f"{metrics['prob_gap_mean']:.1e}",
                        f"{seconds:.1f}",
                    )
                )
                if result.version != step:
                    beyond.append(f"Step {step} made version {result.version}.")
                if not metrics["prob_gap_mean"] <= LARGEST_MEAN:
                    beyond.append(
                        f"Step {step}: probabilities in serving and in training differ by "
                        f"{metrics['prob_gap_mean']:.3f} on average, which may be at most {LARGEST_MEAN:g}."
                    )
            if not saved.exists():
                await running.engine.save(saved)
    return Table(COLUMNS, rows, beyond)
