"""What one update works on: the usable part of a batch, its advantages and weights, and what was left out.

agl's own algorithms see the whole batch here, once, in the driver: statistics over rollouts and groups are right
however veRL spreads the rows over its workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_algorithms.interface import Algorithm, CriticAlgorithm, Samples
from agl_core.learning.carrying import values_without
from agl_core.protocols import UpdateResult
from agl_core.types import Batch, CreditKind, DropReason


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
class Prepared:
    """N transitions came, M of them are usable; the tensors here are over the M's response tokens."""

    screened: Screened
    advantages_R: Tensor
    weights_R: Tensor
    """0 at every token that is not trained on."""
    trained: NDArray[np.int64]
    """Those of the M that the loss is computed on."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not trained on."""
    targets_R: Tensor | None = None
    """What a critic learns; None without one."""
    value_weights_R: Tensor | None = None

    @classmethod
    def of_nothing(cls, screened: Screened) -> Prepared:
        """No transition is usable."""
        nothing = torch.zeros_like(screened.samples.behaviour_R)
        return cls(screened, nothing, nothing, np.zeros(0, dtype=np.int64), screened.dropped)

    def result(self, version: int, metrics: Mapping[str, float]) -> UpdateResult:
        """What became of all N transitions."""
        samples, usable = self.screened.samples, self.screened.usable
        advantage_N, weight_N = np.zeros(len(self.dropped)), np.zeros(len(self.dropped))
        advantage_N[usable] = self._advantage_M()
        weight_N[usable] = _sum_by_transition(self.weights_R, samples).numpy()
        return UpdateResult(version, metrics, advantage_N, weight_N, self.dropped)

    def metrics(self) -> dict[str, float]:
        """Those that do not come from optimizer steps."""
        advantage = self._advantage_M()[self.trained]
        return {
            "advantage_mean": float(advantage.mean()) if len(advantage) else 0.0,
            "advantage_std": float(advantage.std()) if len(advantage) else 0.0,
            "advantage_abs_max": float(np.abs(advantage).max(initial=0.0)),
            "tokens_trained": float((self.weights_R > 0).sum()),
            "transitions_trained": float(len(self.trained)),
            "transitions_dropped": float(len(self.dropped) - len(self.trained)),
        }

    def _advantage_M(self) -> NDArray[np.float64]:
        unmasked_R = self.screened.samples.mask_R.to(torch.float64)
        total = _sum_by_transition(self.advantages_R * unmasked_R, self.screened.samples)
        count = _sum_by_transition(unmasked_R, self.screened.samples).clamp(min=1)
        return np.asarray((total / count).numpy(), dtype=np.float64)


def screen(batch: Batch, *, context_length: int, vocabulary: int) -> Screened:
    """Leave out what cannot be used; rewards of one step that it earned go to the calls before it."""
    dropped = unusable(batch, context_length=context_length, vocabulary=vocabulary)
    usable = np.array([i for i, reason in enumerate(dropped) if reason is None], dtype=np.int64)
    if batch.kind is CreditKind.REWARD and len(usable) < len(batch):
        batch = replace(batch, values_N=values_without(batch, usable))
    part = subset(batch, usable)
    return Screened(part, samples_of(part), usable, tuple(dropped))


def prepare(screened: Screened, algorithm: Algorithm, values_R: Tensor | None = None) -> Prepared:
    """Ask the algorithm for advantages and weights; `values_R` are the critic's, if it needs one."""
    samples, dropped = screened.samples, list(screened.dropped)
    if not len(screened.usable):
        return Prepared.of_nothing(screened)
    advantages_R, weights_R = algorithm.advantages(samples, values_R), algorithm.weights(samples)
    finite_R = torch.isfinite(advantages_R) & torch.isfinite(weights_R)
    targets_R = value_weights_R = None
    if values_R is not None:
        critic = cast(CriticAlgorithm, algorithm)
        targets_R, value_weights_R = critic.value_targets(samples, values_R), critic.value_weights(samples)
        finite_R = finite_R & torch.isfinite(targets_R) & torch.isfinite(value_weights_R)
    broken_M = _sum_by_transition(~finite_R, samples) > 0
    broken_R = broken_M[samples.transition_R]
    advantages_R, weights_R = advantages_R.masked_fill(broken_R, 0.0), weights_R.masked_fill(broken_R, 0.0)
    kept_M = algorithm.keep(samples, advantages_R) & (_sum_by_transition(weights_R, samples) > 0)
    left_out_R = ~kept_M[samples.transition_R]
    weights_R = weights_R.masked_fill(left_out_R, 0.0)
    if targets_R is not None and value_weights_R is not None:
        targets_R = targets_R.masked_fill(left_out_R, 0.0)
        value_weights_R = value_weights_R.masked_fill(left_out_R, 0.0)
    for i, broken, kept in zip(screened.usable, broken_M.tolist(), kept_M.tolist(), strict=True):
        if broken:
            dropped[i] = DropReason.NON_FINITE
        elif not kept:
            dropped[i] = DropReason.NO_ADVANTAGE
    trained = np.flatnonzero(kept_M.numpy()).astype(np.int64)
    return Prepared(screened, advantages_R, weights_R, trained, tuple(dropped), targets_R, value_weights_R)


def samples_of(batch: Batch) -> Samples:
    """A batch as the algorithms see it."""

    def tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

    return Samples(
        transition_R=tensor(np.repeat(np.arange(len(batch)), batch.response_lengths_N), torch.int64),
        mask_R=tensor(batch.mask_R, torch.bool),
        # What was recorded for a forced token means nothing, and may not be finite.
        behaviour_R=tensor(np.where(batch.mask_R, batch.behaviour_logprobs_R, 0.0), torch.float32),
        values_N=tensor(batch.values_N, torch.float64),
        scores_N=tensor(batch.scores_N, torch.float64),
        group_N=tensor(batch.group_N, torch.int64),
        rollout_N=tensor(batch.rollout_N, torch.int64),
        turn_N=tensor(batch.turn_N, torch.int64),
        weight_N=tensor(batch.weight_N, torch.float64),
    )


def parts(batch: Batch, rows: NDArray[np.int64], count: int, seed: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """The transitions `rows` in `count` parts, split between rollouts; fewer if there are fewer rollouts."""
    if count == 1:
        yield rows
        return
    rollout_n = batch.rollout_N[rows]
    shuffled = np.random.default_rng(seed).permutation(np.unique(rollout_n))
    for rollouts in np.array_split(shuffled, count):
        if len(rollouts):
            yield rows[np.isin(rollout_n, rollouts)]


def shares(weights_R: Tensor, batch: Batch, steps: Sequence[NDArray[np.int64]]) -> Tensor:
    """[R] the weights with which each of the optimizer steps `steps` (its transitions) weighs as much as the whole."""
    weight_N = np.zeros(len(batch))
    np.add.at(weight_N, np.repeat(np.arange(len(batch)), batch.response_lengths_N), weights_R.double().numpy())
    share_N, whole = np.ones(len(batch)), weight_N.sum() or 1.0
    for step in steps:
        share_N[step] = weight_N[step].sum() / whole or 1.0
    share_R = torch.from_numpy(np.repeat(share_N, batch.response_lengths_N))
    return (weights_R / share_R).to(weights_R.dtype)


def unusable(batch: Batch, *, context_length: int, vocabulary: int) -> list[DropReason | None]:
    """[N] why each transition cannot be trained on, or None.

    - an empty response, or an empty prompt (nothing predicts the first token): EMPTY_RESPONSE;
    - no unmasked token: FULLY_MASKED;
    - longer than the model's context: TOO_LONG;
    - a log-probability of an unmasked token, credited value, score, weight or temperature that is not finite, a
      temperature that is not positive, a token id the model does not have: NON_FINITE.
    """
    wrong_R = batch.mask_R & ~np.isfinite(batch.behaviour_logprobs_R)
    unknown_T = (batch.tokens_T < 0) | (batch.tokens_T >= vocabulary)
    broken = (
        (_sums(wrong_R, batch.response_offsets) > 0)
        | ~np.isfinite(batch.values_N)
        | ~np.isfinite(batch.scores_N)
        | ~np.isfinite(batch.weight_N)
        | ~(np.isfinite(batch.temperature_N) & (batch.temperature_N > 0))
        | (_sums(unknown_T, batch.offsets) > 0)
    )
    reasons = np.select(
        [
            (batch.response_lengths_N == 0) | (batch.prompt_lengths_N == 0),
            _sums(batch.mask_R, batch.response_offsets) == 0,
            np.diff(batch.offsets) > context_length,
            broken,
        ],
        [DropReason.EMPTY_RESPONSE, DropReason.FULLY_MASKED, DropReason.TOO_LONG, DropReason.NON_FINITE],
        default="",
    )
    return [DropReason(reason) if reason else None for reason in reasons.tolist()]


def subset(batch: Batch, chosen: NDArray[np.int64]) -> Batch:
    """The transitions `chosen`, in this order."""
    tokens, offsets = _ranges(batch.offsets, chosen)
    responses, response_offsets = _ranges(batch.response_offsets, chosen)
    place = {"N": chosen, "T": tokens, "R": responses}
    picked = {
        field.name: getattr(batch, field.name)[place[field.name[-1]]]
        for field in fields(batch)
        if field.name[-2:] in ("_N", "_T", "_R")
    }
    return Batch(
        **picked,
        offsets=offsets,
        response_offsets=response_offsets,
        kind=batch.kind,
        keys=tuple(batch.keys[i] for i in chosen),
    )


def _ranges(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the items of the chosen segments lie, and the offsets of those segments put one after the other."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return items.astype(np.int64), new_offsets


def _sums(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    totals = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.asarray(totals[offsets[1:]] - totals[offsets[:-1]])


def _sum_by_transition(values_R: Tensor, samples: Samples) -> Tensor:
    totals = torch.zeros(samples.values_N.numel(), dtype=torch.float64)
    return totals.index_add(0, samples.transition_R, values_R.to(torch.float64))
