"""The cases in which the two engines are compared, and the measure of how close they come.

`python -m algorithms.verl.tests.parity`, in the environment of `make test-verl`, writes the table of
docs/verl-parity.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agl_core.types import CreditKind

from . import verl_bench

ROOT = Path(__file__).resolve().parents[3]
POLICY = ROOT / "examples" / "calc" / "policy"
STEPS = (1, 3)
"""Two updates in a row, and a training step between them without one: at the first one every value of a critic is zero,
and every ratio is one."""
VOCABULARY = 512


@dataclass(frozen=True)
class Case:
    """An algorithm with options."""

    name: str
    options: Mapping[str, Any]
    kind: CreditKind = CreditKind.RETURN


CASES = {
    "GRPO": Case("grpo", {"beta": 0.04, "epochs": 2, "importance_cap": 2.0}),
    "GRPO, one ratio per transition (GSPO)": Case(
        "grpo", {"beta": 0, "ratio": "sequence", "clip": 0.01, "clip_high": 0.02, "epochs": 2}
    ),
    "GRPO, two passes in three minibatches": Case("grpo", {"beta": 0.001, "epochs": 2, "minibatches": 3}),
    "PPO with its critic": Case("ppo", {"critic_learning_rate": 1e-3, "epochs": 2, "critic_epochs": 2, "lam": 0.9}),
    "PPO across calls, in three minibatches": Case(
        "ppo",
        {"critic_learning_rate": 1e-3, "across_calls": True, "gamma": 0.95, "lam": 0.9, "minibatches": 3},
        CreditKind.REWARD,
    ),
    "REINFORCE++": Case("reinforce++", {"epochs": 2, "aggregation": "token-mean"}),
    "REINFORCE++ across calls": Case(
        "reinforce++", {"across_calls": True, "gamma": 0.95, "whitening": "transitions"}, CreditKind.REWARD
    ),
}


@dataclass(frozen=True)
class Distance:
    """How far veRL's updates are from the torch engine's; the largest of all of them."""

    advantages: float
    """Largest difference of a transition's advantage,"""
    weights: float
    """and of its weight."""
    loss: float
    """Difference, of the value loss too if there is one; relative for losses above 1."""
    cosine: float
    """Of the parameter changes, the critic's too."""
    norm: float
    """Relative difference of their norms."""
    same_dropped: bool

    @property
    def within(self) -> bool:
        """True if they are the same updates: the limits of docs/verl-parity.md."""
        close = self.advantages <= 1e-6 and self.weights <= 1e-6 and self.loss <= 1e-5
        return close and self.cosine >= 0.9999 and self.norm <= 1e-3 and self.same_dropped


def distance(model: Path, case: Case) -> Distance:
    """Make the updates with both engines, from the same weights."""
    by_torch = verl_bench.TorchBench(model, case.name, case.options)
    by_verl = verl_bench.VerlBench(model, case.name, case.options)
    batches = [
        verl_bench.recorded_batch(VOCABULARY, case.kind, seed=number, step=step) for number, step in enumerate(STEPS)
    ]
    return compared(*((by_torch.update(batch), by_verl.update(batch, VOCABULARY)) for batch in batches))


def compared(*updates: tuple[verl_bench.Made, verl_bench.Made]) -> Distance:
    """Updates of both engines, the torch engine's first."""
    losses = [(ours.loss, verls.loss) for ours, verls in updates]
    changes = [(ours.change, verls.change) for ours, verls in updates]
    for ours, verls in updates:
        if ours.value_loss is not None and verls.value_loss is not None:
            losses.append((ours.value_loss, verls.value_loss))
        if ours.critic_change is not None and verls.critic_change is not None:
            changes.append((ours.critic_change, verls.critic_change))
    return Distance(
        advantages=max(float(np.abs(ours.advantage_N - verls.advantage_N).max()) for ours, verls in updates),
        weights=max(float(np.abs(ours.weight_N - verls.weight_N).max()) for ours, verls in updates),
        loss=max(abs(b - a) / max(1.0, abs(a)) for a, b in losses),
        cosine=min(_cosine(a, b) for a, b in changes),
        norm=max(abs(float(b.norm() / a.norm()) - 1) for a, b in changes),
        same_dropped=all(ours.dropped == verls.dropped for ours, verls in updates),
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def main() -> None:
    """Write the rows of the page's table, below the one with the limits."""
    rows = []
    for name, case in CASES.items():
        found = distance(POLICY, case)
        if not found.within:
            raise SystemExit(f"{name}: the engines made different updates: {found}")
        rows.append(
            f"| {name} | {found.advantages:.1e} | {found.loss:.1e} | 1 - {1 - found.cosine:.1e} | {found.norm:.1e} |"
        )
    page = ROOT / "docs" / "verl-parity.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines, 1) if line.startswith("| *limit* |"))
    lines[start : lines.index("", start)] = rows
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
