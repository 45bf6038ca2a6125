"""Updates that two engines make with the same batches: the cases, and the measure of how close they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_core.protocols import UpdateResult
from agl_core.types import CreditKind

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.json"
STEPS = (1, 3)
"""Two updates in a row, and a training step between them without one: at the first one every value of a critic is zero,
and every ratio is one."""
Metrics: TypeAlias = Mapping[str, float]
METRICS = (
    *("policy_loss", "kl_behaviour", "kl_reference", "ratio_mean", "ratio_max", "clip_fraction", "importance_mean"),
    *("entropy", "pair_accuracy", "pair_margin", "pairs"),
)


@dataclass(frozen=True)
class Case:
    """An algorithm with options."""

    name: str
    options: Mapping[str, Any]
    kind: CreditKind = CreditKind.RETURN


CASES = {
    "GRPO": Case("grpo", {"beta": 0.04, "epochs": 2, "importance_cap": 2.0}),
    "GRPO, one optimizer step": Case("grpo", {"beta": 0.04, "importance_cap": 2.0}),
    "GRPO, one ratio per transition (GSPO)": Case(
        "grpo", {"beta": 0, "ratio": "sequence", "clip": 0.01, "clip_high": 0.02, "epochs": 2}
    ),
    "GRPO with an entropy bonus": Case("grpo", {"entropy": 0.05, "epochs": 2}),
    "GRPO of credited advantages (CISPO)": Case("grpo", {"surrogate": "cispo", "epochs": 2}, CreditKind.ADVANTAGE),
    "DPO": Case("dpo", {}),
    "GRPO, two passes in three minibatches": Case("grpo", {"beta": 0.04, "epochs": 2, "minibatches": 3}),
    "PPO with its critic": Case("ppo", {"critic_learning_rate": 1e-3, "epochs": 2, "critic_epochs": 2, "lam": 0.9}),
    "PPO across calls, in three minibatches": Case(
        "ppo",
        {"critic_learning_rate": 1e-3, "across_calls": True, "gamma": 0.95, "lam": 0.9, "minibatches": 3},
        CreditKind.REWARD,
    ),
    "SFT, in two minibatches": Case("sft", {"minibatches": 2}),
    "RFT, the best of each group": Case("rft", {"top_k": 1, "aggregation": "token-mean"}),
    "REINFORCE++": Case("reinforce++", {"epochs": 2, "aggregation": "token-mean"}),
    "REINFORCE++ across calls": Case(
        "reinforce++", {"across_calls": True, "gamma": 0.95, "whitening": "transitions"}, CreditKind.REWARD
    ),
}


@dataclass(frozen=True)
class Made:
    """An engine's update with a batch."""

    result: UpdateResult
    change: Tensor
    """How all trained parameters of the policy moved, in the model's order."""
    critic_change: Tensor | None = None
    pads: tuple[int, ...] = ()
    """Which of veRL's rows are pad rows."""


@dataclass(frozen=True)
class Distance:
    """How far updates are from those made another way; the largest of all of them."""

    advantages: float
    """Largest difference of a transition's advantage,"""
    weights: float
    """and of its weight."""
    loss: float
    """Difference, of the value loss too if there is one; relative for losses above 1."""
    cosine: float
    """The parameter changes' cosine, the critic's too."""
    norm: float
    """Relative difference of their norms."""
    metrics: float
    """Difference of a metric of the policy's loss, relative for metrics above 1."""
    logprobs: float
    """Difference of a token's log-probability in the certificate, relative below -1."""
    same_dropped: bool

    @property
    def within(self) -> bool:
        """True if they are the same updates: the limits of docs/exactness.md."""
        close = self.advantages <= 1e-6 and self.weights <= 1e-6 and self.loss <= 1e-5
        alike = self.cosine >= 0.9999 and self.norm <= 1e-3 and self.metrics <= 1e-3
        return close and alike and self.logprobs <= 1e-5 and self.same_dropped


def compared(*updates: tuple[Made, Made]) -> Distance:
    """Updates of two ways, in pairs."""
    results = [(ours.result, others.result) for ours, others in updates]
    metrics = [(ours.metrics, others.metrics) for ours, others in results]
    changes = [(ours.change, others.change) for ours, others in updates]
    for ours, others in updates:
        if ours.critic_change is not None and others.critic_change is not None:
            changes.append((ours.critic_change, others.critic_change))
    return Distance(
        advantages=max(float(np.abs(ours.advantage_N - others.advantage_N).max()) for ours, others in results),
        weights=max(float(np.abs(ours.weight_N - others.weight_N).max()) for ours, others in results),
        loss=_largest_difference(metrics, ("loss", "value_loss")),
        cosine=min(_cosine(a, b) for a, b in changes),
        norm=max(abs(float(b.norm() / a.norm()) - 1) for a, b in changes),
        metrics=_largest_difference(metrics, METRICS),
        logprobs=max(
            _difference(float(a), float(b))
            for ours, others in results
            for a, b in zip(_known(ours), _known(others), strict=True)
        ),
        same_dropped=all(ours.dropped == others.dropped for ours, others in results),
    )


def _largest_difference(pairs: Sequence[tuple[Metrics, Metrics]], names: Sequence[str]) -> float:
    """0 where no algorithm of a pair has such a metric."""
    both = [(a[name], b[name]) for a, b in pairs for name in names if name in a and name in b]
    return max((_difference(one, other) for one, other in both), default=0.0)


def _known(result: UpdateResult) -> NDArray[np.float32]:
    logprobs = np.concatenate([logprobs for logprobs in result.logprobs_N if logprobs is not None])
    return logprobs[np.isfinite(logprobs)]


def _difference(one: float, other: float) -> float:
    return abs(other - one) / max(1.0, abs(one))


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def write(found: Mapping[str, Mapping[str, Distance]]) -> None:
    """Put comparisons, by the names of their cases, into docs/parity.json; others stay as they are."""
    known = json.loads(PAGE.read_text(encoding="utf-8"))
    known |= {name: {case: _figures(case, distance) for case, distance in of.items()} for name, of in found.items()}
    PAGE.write_text(f"{json.dumps(known, indent=1, ensure_ascii=False)}\n", encoding="utf-8")


def _figures(name: str, distance: Distance) -> dict[str, float]:
    if not distance.within:
        raise SystemExit(f"{name}: these are different updates: {distance}")
    figures = {key: getattr(distance, key) for key in ("advantages", "loss", "metrics", "norm")}
    return {key: float(f"{value:.1e}") for key, value in (figures | {"1 - cosine": 1 - distance.cosine}).items()}
