"""GRPO: Group Relative Policy Optimization, and the variants practitioners use.

For transition t of rollout i with credited value v_it, group mean μ and standard deviation σ (`group_statistics`), and
token weights w (`agl_algorithms.policy_gradient.token_weights`):

    A_it = (v_it − μ) / (σ + 1e-6)
    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − clip, 1 + clip_high)·A) · ρ  +  β · k3(π ‖ π_initial) )

- GRPO: DeepSeekMath, arXiv 2402.03300, equations 3 and 4.
- `clip_high`: DAPO, arXiv 2503.14476, equation 10. `aggregation = "token-mean"`: its loss by tokens, but over the
  batch, not in each group.
- `std_normalization = false`: Dr. GRPO, arXiv 2503.20783, section 3.2.
- `normalize = "each"`: GDPO, arXiv 2601.05242, section 3: v are sums of rewards that were normalised one by one
  (`agl_core.learning.rewards.normalized`), and A is v whitened over the tokens of the batch.
- `ratio = "sequence"`: GSPO, arXiv 2507.18071, equations 5 to 7; the sequence is one transition.
- `importance_cap`, `importance_level`: ρ = min(π_old / π_behaviour, `importance_cap`), otherwise ρ = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agl_algorithms.plugin import GrpoOptions
from agl_algorithms.policy_gradient import PolicyGradient, Samples, count_rollouts, segment_sum, whitened
from agl_core.types import rounding


class Grpo(PolicyGradient):
    """GRPO with its options; see the module for the formulas."""

    options: GrpoOptions
    epsilon = 1e-6
    """Added to the group's standard deviation, as veRL does; TRL adds 1e-4."""

    def __init__(self, options: GrpoOptions) -> None:
        super().__init__(options)
        self.ratio = options.ratio

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the transition's advantage at its unmasked tokens, 0 at masked ones and in a group of one rollout."""
        if self.options.normalize == "each":
            return whitened(samples.at_tokens(samples.values_N), samples, "tokens").to(samples.behaviour_R.dtype)
        group = group_statistics(samples)
        advantage_N = group.deviation_N
        if self.options.std_normalization:
            advantage_N = advantage_N / (group.std_N + self.epsilon)
        return samples.at_tokens(torch.where(group.rollouts_N >= 2, advantage_N, 0.0))


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The credited values of each transition's group, spread over its transitions. All float64."""

    deviation_N: Tensor
    """[N] credited value minus the group's mean μ."""
    std_N: Tensor
    """[N] the group's standard deviation (unbiased); 0 where all values of the group are equal."""
    rollouts_N: Tensor
    """[N] how many rollouts the group has."""


def group_statistics(samples: Samples) -> GroupStatistics:
    """Mean and standard deviation of the credited values of each group, over rollouts, not transitions.

    With v_it the value of transition t of rollout i (T_i transitions, G rollouts, also those of `absent_values_A`):

        μ  = 1/G · Σ_i 1/T_i · Σ_t v_it
        σ² = 1/(G−1) · Σ_i 1/T_i · Σ_t (v_it − μ)²

    Values that differ by rounding alone (`agl_core.types.rounding`) are equal, and deviate by exactly zero.

    If credit is identical within rollouts (v_it = R_i), these are the usual mean and unbiased standard deviation of R.
    If not, σ has the spread inside rollouts too: that of their means alone could vanish while deviations do not.
    """
    values_K = torch.cat([samples.values_N, samples.absent_values_A]).to(torch.float64)
    labels, group_K = torch.unique(torch.cat([samples.group_N, samples.absent_groups_A]), return_inverse=True)
    groups, count = labels.numel(), len(samples)
    turns_K = torch.ones_like(values_K)
    turns_K[:count], _, _ = count_rollouts(samples, turns_K[:count])

    def mean_by_group(of_K: Tensor, rollouts_K: Tensor) -> Tensor:
        return segment_sum(of_K / turns_K, group_K, groups)[group_K] / rollouts_K

    def extreme(of_K: Tensor, which: str) -> Tensor:
        """[K] the group's smallest (`amin`) or largest (`amax`)."""
        by_group = torch.zeros(groups, dtype=torch.float64, device=of_K.device)
        return by_group.scatter_reduce(0, group_K, of_K, which, include_self=False)[group_K]

    rollouts_K = mean_by_group(torch.ones_like(values_K), torch.ones_like(values_K)).round()
    # Values are first shifted by the group's smallest, so that equal values deviate by exactly zero.
    shifted_K = values_K - extreme(values_K, "amin")
    is_equal_K = extreme(shifted_K, "amax") <= rounding(extreme(values_K.abs(), "amax"))
    shifted_K = torch.where(is_equal_K, 0.0, shifted_K)
    deviation_K = shifted_K - mean_by_group(shifted_K, rollouts_K)
    variance_K = mean_by_group(deviation_K.square(), (rollouts_K - 1).clamp(min=1))
    return GroupStatistics(deviation_K[:count], variance_K.sqrt()[:count], rollouts_K[:count])
