"""Statistics over the rollouts of a group and over a batch, and sums over segments of flat tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agl_algorithms.interface import Samples
from agl_algorithms.options import WhiteningUnit
from agl_core.returns import EQUAL_WITHIN

WHITENING_EPSILON = 1e-8
"""Added to the variance, as veRL's `masked_whiten` does."""


def segment_sum(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """[segments] sums of `values` [K] by `segment` [K] int64.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
    [3.0, 0.0, 4.0]
    """
    return values.new_zeros(segments).index_add(0, segment, values)


def segment_count(segment: Tensor, segments: int) -> Tensor:
    """[segments] how often each segment occurs, float64."""
    return segment_sum(torch.ones_like(segment, dtype=torch.float64), segment, segments)


def dense(labels: Tensor) -> tuple[Tensor, int]:
    """Labels renumbered 0 … K-1, and K."""
    found, inverse = torch.unique(labels, return_inverse=True)
    return inverse, found.numel()


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The credited values of each transition's group, spread over its transitions. All float64."""

    mean_N: Tensor
    """[N] the group's mean."""
    deviation_N: Tensor
    """[N] credited value minus the group's mean."""
    std_N: Tensor
    """[N] the group's standard deviation (unbiased); 0 where all values of the group are equal."""
    rollouts_N: Tensor
    """[N] how many rollouts the group has."""

    @property
    def comparable_N(self) -> Tensor:
        """[N] bool: the group has at least two rollouts."""
        return self.rollouts_N >= 2


def group_statistics(samples: Samples) -> GroupStatistics:
    """Mean and standard deviation of the credited values of each group, over rollouts, not transitions.

    A rollout counts once, whatever its number of transitions: they share its weight. With v_it the value of transition
    t of rollout i (T_i transitions, G rollouts):

        μ  = 1/G · Σ_i 1/T_i · Σ_t v_it
        σ² = 1/(G−1) · Σ_i 1/T_i · Σ_t (v_it − μ)²

    Values that differ by rounding alone (`agl_core.returns.EQUAL_WITHIN`) are equal, and deviate by exactly zero.

    If credit is identical within rollouts (v_it = R_i), these are the usual mean and unbiased standard deviation of R.
    If it is not, σ also contains the spread inside rollouts: the standard deviation of the rollouts' means alone could
    vanish while the deviations do not.
    """
    values_N = samples.values_N.to(torch.float64)
    group_N, groups = dense(samples.group_N)
    rollout_N, rollouts = dense(samples.rollout_N)
    rollouts_of_group = segment_count(_group_of_rollout(group_N, rollout_N, rollouts), groups)
    share_N = 1.0 / segment_count(rollout_N, rollouts)[rollout_N]  # 1/T_i

    # Values are first shifted by the group's smallest, so that equal values deviate by exactly zero.
    smallest = torch.full((groups,), torch.inf, dtype=torch.float64, device=values_N.device)
    smallest = smallest.scatter_reduce(0, group_N, values_N, "amin")
    shifted_N = values_N - smallest[group_N]
    largest = torch.stack([shifted_N, values_N.abs()])
    spread, scale = (torch.zeros_like(smallest).scatter_reduce(0, group_N, each_N, "amax") for each_N in largest)
    shifted_N = torch.where((spread < EQUAL_WITHIN * scale)[group_N], 0.0, shifted_N)
    mean = segment_sum(shifted_N * share_N, group_N, groups) / rollouts_of_group
    deviation_N = shifted_N - mean[group_N]
    variance = segment_sum(deviation_N.square() * share_N, group_N, groups) / (rollouts_of_group - 1).clamp(min=1)
    return GroupStatistics(
        mean_N=(smallest + mean)[group_N],
        deviation_N=deviation_N,
        std_N=variance.sqrt()[group_N],
        rollouts_N=rollouts_of_group[group_N],
    )


def _group_of_rollout(group_N: Tensor, rollout_N: Tensor, rollouts: int) -> Tensor:
    return torch.zeros(rollouts, dtype=torch.int64, device=group_N.device).scatter(0, rollout_N, group_N)


def count_rollouts(samples: Samples, taking_part_N: Tensor) -> tuple[Tensor, int]:
    """[N] rollouts with a transition in `taking_part_N` in each transition's group, and the groups with one."""
    group_N, groups = dense(samples.group_N)
    rollout_N, rollouts = dense(samples.rollout_N)
    taking_part = segment_sum(taking_part_N.to(torch.float64), rollout_N, rollouts) > 0
    per_group = segment_sum(taking_part.to(torch.float64), _group_of_rollout(group_N, rollout_N, rollouts), groups)
    return per_group[group_N], int((per_group > 0).sum())


def whitened(values_R: Tensor, samples: Samples, over: WhiteningUnit) -> Tensor:
    """[R] float64 `values_R` of the unmasked tokens, shifted and scaled to mean 0 and variance 1; 0 where masked.

    With K units, of which token r is the share s_r (over "tokens": each is one unit; over "transitions": 1/|a_t|):

        μ  = 1/K · Σ_r s_r · v_r
        σ² = 1/(K−1) · Σ_r s_r · (v_r − μ)²
        (v_r − μ) / √(σ² + 1e-8)

    Values that are equal (`agl_core.returns.EQUAL_WITHIN`), and those of a single unit, become exactly zero.
    """
    mask_R = samples.mask_R
    transitions = samples.values_N.numel()
    tokens_N = segment_count(samples.transition_R[mask_R], transitions)
    share_R = mask_R.to(torch.float64)
    if over == "transitions":
        share_R = share_R / tokens_N.clamp(min=1)[samples.transition_R]
    units = tokens_N.sum() if over == "tokens" else (tokens_N > 0).sum()
    if units < 2:
        return torch.zeros_like(share_R)
    unmasked_R = values_R.to(torch.float64).masked_fill(~mask_R, 0.0)
    shifted_R = torch.where(mask_R, unmasked_R - unmasked_R[mask_R].min(), 0.0)
    if shifted_R.max() <= EQUAL_WITHIN * unmasked_R.abs().max():
        return torch.zeros_like(share_R)
    deviation_R = torch.where(mask_R, shifted_R - (share_R * shifted_R).sum() / units, 0.0)
    variance = (share_R * deviation_R.square()).sum() / (units - 1)
    return deviation_R * torch.rsqrt(variance + WHITENING_EPSILON)


def explained_variance(values_R: Tensor, targets_R: Tensor, weights_R: Tensor) -> float:
    """1 − Var(target − value) / Var(target), variances by weight; NaN if the targets are all equal.

    1: the critic predicts every target; 0: no better than a constant; below 0: worse than a constant.
    """

    def variance(of_R: Tensor) -> Tensor:
        mean = (share_R * of_R).sum()
        return (share_R * (of_R - mean).square()).sum()

    counted_R = weights_R > 0
    share_R = weights_R[counted_R].to(torch.float64)
    share_R = share_R / share_R.sum()
    target_R = targets_R[counted_R].to(torch.float64)
    if not target_R.numel() or target_R.max() - target_R.min() <= EQUAL_WITHIN * target_R.abs().max():
        return float("nan")
    left = variance(target_R - values_R[counted_R].to(torch.float64))
    return float(1 - left / variance(target_R))
