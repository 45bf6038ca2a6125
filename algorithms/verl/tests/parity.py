"""The cases in which the two engines are compared, and the measure of how close they come.

`python -m algorithms.verl.tests.parity`, in the environment of `make test-verl`, writes docs/parity.json.
"""

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
from agl_core.types import Batch, CreditKind

from . import verl_bench

ROOT = Path(__file__).resolve().parents[3]
POLICY = ROOT / "examples" / "calc" / "policy"
STEPS = (1, 3)
"""Two updates in a row, and a training step between them without one: at the first one every value of a critic is zero,
and every ratio is one."""
VOCABULARY = 512
Metrics: TypeAlias = Mapping[str, float]
METRICS = (
    *("policy_loss", "kl_behaviour", "kl_reference", "ratio_mean", "ratio_max", "clip_fraction", "importance_mean"),
    "entropy",
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
class Distance:
    """How far updates are from those made another way; the largest of all of them."""

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


def distance(model: Path, case: Case) -> Distance:
    """Make the updates with both engines, from the same weights."""
    by_torch = verl_bench.TorchBench(model, case.name, case.options)
    by_verl = verl_bench.VerlBench(model, case.name, case.options)
    return compared(*((by_torch.update(batch), by_verl.update(batch, VOCABULARY)) for batch in _batches(case)))


def distance_of_rows(model: Path, case: Case) -> Distance:
    """Make veRL's updates with a row for each call, and with a row for calls that continue each other."""
    return _distance_of(model, case, {"joins_calls": False})


def distance_of_scoring(model: Path, case: Case) -> Distance:
    """Make veRL's updates with old log-probabilities from a pass of their own, and as in a run."""
    return _distance_of(model, case, {"scores_first": True})


def _distance_of(model: Path, case: Case, other: Mapping[str, bool]) -> Distance:
    ways = [verl_bench.VerlBench(model, case.name, case.options, **settings) for settings in (other, {})]
    return compared(*(tuple(way.update(batch, VOCABULARY) for way in ways) for batch in _batches(case)))  # type: ignore[arg-type]


def _batches(case: Case) -> list[Batch]:
    return [
        verl_bench.recorded_batch(VOCABULARY, case.kind, seed=number, step=step) for number, step in enumerate(STEPS)
    ]


def compared(*updates: tuple[verl_bench.Made, verl_bench.Made]) -> Distance:
    """Updates of two ways, in pairs."""
    results = [(ours.result, verls.result) for ours, verls in updates]
    metrics = [(ours.metrics, verls.metrics) for ours, verls in results]
    changes = [(ours.change, verls.change) for ours, verls in updates]
    for ours, verls in updates:
        if ours.critic_change is not None and verls.critic_change is not None:
            changes.append((ours.critic_change, verls.critic_change))
    return Distance(
        advantages=max(float(np.abs(ours.advantage_N - verls.advantage_N).max()) for ours, verls in results),
        weights=max(float(np.abs(ours.weight_N - verls.weight_N).max()) for ours, verls in results),
        loss=_largest_difference(metrics, ("loss", "value_loss")),
        cosine=min(_cosine(a, b) for a, b in changes),
        norm=max(abs(float(b.norm() / a.norm()) - 1) for a, b in changes),
        metrics=_largest_difference(metrics, METRICS),
        logprobs=max(
            _difference(float(a), float(b))
            for ours, verls in results
            for a, b in zip(_known(ours), _known(verls), strict=True)
        ),
        same_dropped=all(ours.dropped == verls.dropped for ours, verls in results),
    )


def _largest_difference(pairs: Sequence[tuple[Metrics, Metrics]], names: Sequence[str]) -> float:
    return max(_difference(a[name], b[name]) for a, b in pairs for name in names if name in a and name in b)


def _known(result: UpdateResult) -> NDArray[np.float32]:
    logprobs = np.concatenate([logprobs for logprobs in result.logprobs_N if logprobs is not None])
    return logprobs[np.isfinite(logprobs)]


def _difference(one: float, other: float) -> float:
    return abs(other - one) / max(1.0, abs(one))


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


def main() -> None:
    measures = {"both engines": distance, "a row for each call, and for a conversation": distance_of_rows}
    found = {
        compared: {name: _figures(name, measure(POLICY, case)) for name, case in CASES.items()}
        for compared, measure in measures.items()
    }
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (ROOT / "docs" / "parity.json").write_text(f"{text}\n", encoding="utf-8")


def _figures(name: str, distance: Distance) -> dict[str, float]:
    if not distance.within:
        raise SystemExit(f"{name}: these are different updates: {distance}")
    figures = {key: getattr(distance, key) for key in ("advantages", "loss", "metrics", "norm")}
    return {key: float(f"{value:.1e}") for key, value in (figures | {"1 - cosine": 1 - distance.cosine}).items()}


if __name__ == "__main__":
    main()
