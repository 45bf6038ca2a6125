"""What one update works on: the usable part of a batch, its advantages and weights, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_algorithms.interface import Algorithm, CriticAlgorithm, Samples
from agl_core.learning.carrying import values_without
from agl_core.protocols import UpdateResult
from agl_core.types import Batch, CreditKind, DropReason
from agl_torch.model import LoadedModel
from agl_torch.validation import subset, unusable


@dataclass(frozen=True, slots=True)
class Screened:
    """N transitions came, M of them are usable; batch and samples are of these M."""

    batch: Batch
    samples: Samples
    usable: NDArray[np.int64]
    """[M] their places among the N."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not usable."""


@dataclass(frozen=True, slots=True)
class ValueTraining:
    """What a critic learns from, each [R]."""

    values_R: Tensor
    """Its own, before the update."""
    targets_R: Tensor
    weights_R: Tensor
    """0 at every token of a transition that is not trained on."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """N transitions came, M of them are usable; the arrays and tensors here are over these M."""

    batch: Batch
    samples: Samples
    advantages_R: Tensor
    weights_R: Tensor
    """0 at every token that is not trained on."""
    usable: NDArray[np.int64]
    """[M] their places among the N."""
    trained: NDArray[np.int64]
    """Those of the M that the loss is computed on."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not trained on."""
    value: ValueTraining | None = None
    """None without a critic."""

    def minibatches(self, count: int, seed: Sequence[int]) -> Iterator[NDArray[np.int64]]:
        """The trained transitions in `count` parts, split between rollouts; fewer if there are fewer rollouts."""
        if count == 1:
            if len(self.trained):
                yield self.trained
            return
        rollout_n = self.batch.rollout_N[self.trained]
        shuffled = np.random.default_rng(seed).permutation(np.unique(rollout_n))
        for rollouts in np.array_split(shuffled, count):
            if len(rollouts):
                yield self.trained[np.isin(rollout_n, rollouts)]

    def share(self, weights_R: Tensor, chosen: NDArray[np.int64]) -> float:
        """How much of all the weight the chosen transitions have."""
        return float(_sum_by_transition(weights_R, self.samples)[chosen].sum()) / float(weights_R.sum())

    def result(self, version: int, metrics: Mapping[str, float]) -> UpdateResult:
        """What became of all N transitions."""
        advantage_N, weight_N = np.zeros(len(self.dropped)), np.zeros(len(self.dropped))
        advantage_N[self.usable] = self._advantage_M()
        weight_N[self.usable] = self.weight_M().cpu().numpy()
        return UpdateResult(version, metrics, advantage_N, weight_N, self.dropped)

    def metrics(self, old_R: Tensor) -> dict[str, float]:
        """Those that do not come from optimizer steps."""
        advantage = self._advantage_M()[self.trained]
        counted_R = self.weights_R > 0
        gap_R = (old_R - self.samples.behaviour_R)[counted_R].abs()
        gap_R = gap_R[torch.isfinite(gap_R)]  # A skipped step leaves tokens that were not computed.
        return {
            "advantage_mean": float(advantage.mean()) if len(advantage) else 0.0,
            "advantage_std": float(advantage.std()) if len(advantage) else 0.0,
            "advantage_abs_max": float(np.abs(advantage).max(initial=0.0)),
            "logprob_gap_max": float(gap_R.max()) if gap_R.numel() else 0.0,
            "tokens_trained": float(counted_R.sum()),
            "transitions_trained": float(len(self.trained)),
            "transitions_dropped": float(len(self.dropped) - len(self.trained)),
        }

    def weight_M(self) -> Tensor:
        """[M] summed token weights."""
        return _sum_by_transition(self.weights_R, self.samples)

    def _advantage_M(self) -> NDArray[np.float64]:
        unmasked_R = self.samples.mask_R.to(self.advantages_R.dtype)
        total = _sum_by_transition(self.advantages_R * unmasked_R, self.samples)
        mean = total / _sum_by_transition(unmasked_R, self.samples).clamp(min=1)
        return np.asarray(mean.cpu().numpy(), dtype=np.float64)


def screen(batch: Batch, loaded: LoadedModel) -> Screened:
    """Leave out what cannot be used; rewards of one step that it earned go to the calls before it."""
    dropped = unusable(batch, context_length=loaded.context_length, vocabulary=loaded.vocabulary)
    usable = np.array([i for i, reason in enumerate(dropped) if reason is None], dtype=np.int64)
    if batch.kind is CreditKind.REWARD and len(usable) < len(batch):
        batch = replace(batch, values_N=values_without(batch, usable))
    part = subset(batch, usable)
    return Screened(part, _samples(part, loaded), usable, tuple(dropped))


def prepare(screened: Screened, algorithm: Algorithm, values_R: Tensor | None = None) -> Prepared:
    """Ask the algorithm for advantages and weights; `values_R` are the critic's, if it needs one."""
    part, samples, usable = screened.batch, screened.samples, screened.usable
    dropped = list(screened.dropped)
    if not len(usable):
        nothing = samples.behaviour_R
        return Prepared(part, samples, nothing, nothing, usable, usable, tuple(dropped))
    advantages_R, weights_R = algorithm.advantages(samples, values_R), algorithm.weights(samples)
    finite_R = torch.isfinite(advantages_R) & torch.isfinite(weights_R)
    value = None
    if values_R is not None:
        value = _value_training(samples, cast(CriticAlgorithm, algorithm), values_R)
        finite_R = finite_R & torch.isfinite(value.targets_R) & torch.isfinite(value.weights_R)
    broken_M = _sum_by_transition(~finite_R, samples) > 0
    broken_R = broken_M[samples.transition_R]
    advantages_R, weights_R = advantages_R.masked_fill(broken_R, 0.0), weights_R.masked_fill(broken_R, 0.0)
    kept_M = algorithm.keep(samples, advantages_R) & (_sum_by_transition(weights_R, samples) > 0)
    left_out_R = ~kept_M[samples.transition_R]
    weights_R = weights_R.masked_fill(left_out_R, 0.0)
    if value is not None:
        value = replace(value, weights_R=value.weights_R.masked_fill(left_out_R, 0.0))
    for i, broken, kept in zip(usable, broken_M.tolist(), kept_M.tolist(), strict=True):
        if broken:
            dropped[i] = DropReason.NON_FINITE
        elif not kept:
            dropped[i] = DropReason.NO_ADVANTAGE
    trained = np.flatnonzero(kept_M.cpu().numpy()).astype(np.int64)
    return Prepared(part, samples, advantages_R, weights_R, usable, trained, tuple(dropped), value)


def _value_training(samples: Samples, algorithm: CriticAlgorithm, values_R: Tensor) -> ValueTraining:
    return ValueTraining(values_R, algorithm.value_targets(samples, values_R), algorithm.value_weights(samples))


def _samples(batch: Batch, loaded: LoadedModel) -> Samples:
    def on_device(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=loaded.device, dtype=dtype)

    return Samples(
        transition_R=on_device(np.repeat(np.arange(len(batch)), batch.response_lengths_N), torch.int64),
        mask_R=on_device(batch.mask_R, torch.bool),
        # What was recorded for a forced token means nothing, and may not be finite.
        behaviour_R=on_device(
            np.where(batch.mask_R, batch.behaviour_logprobs_R, 0.0), torch.promote_types(loaded.dtype, torch.float32)
        ),
        values_N=on_device(batch.values_N, torch.float64),
        scores_N=on_device(batch.scores_N, torch.float64),
        group_N=on_device(batch.group_N, torch.int64),
        rollout_N=on_device(batch.rollout_N, torch.int64),
        turn_N=on_device(batch.turn_N, torch.int64),
        weight_N=on_device(batch.weight_N, torch.float64),
    )


def _sum_by_transition(values_R: Tensor, samples: Samples) -> Tensor:
    totals = torch.zeros(samples.values_N.numel(), dtype=torch.float64, device=values_R.device)
    return totals.index_add(0, samples.transition_R, values_R.to(torch.float64))
