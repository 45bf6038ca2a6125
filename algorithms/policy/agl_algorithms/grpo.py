"""GRPO: Group Relative Policy Optimization, and the variants practitioners use.

For transition t of rollout i with credited value v_it, group mean μ and standard deviation σ
(`agl_algorithms.statistics.group_statistics`), token weights w (`agl_algorithms.aggregation.token_weights`):

    A_it = (v_it − μ) / (σ + ε)
    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − clip, 1 + clip_high)·A) · ρ  +  β · k3(π ‖ π_initial) )

- GRPO: DeepSeekMath, arXiv 2402.03300, equations 3 and 4.
- `clip_high`: DAPO, arXiv 2503.14476, equation 10. `drop_equal_groups`: the filter of its equation 11, without sampling
  other groups instead. `aggregation = "token-mean"`: its loss by tokens, but over the batch, not in each group.
- `std_normalization = false`: Dr. GRPO, arXiv 2503.20783, section 3.2.
- `ratio = "sequence"`: GSPO, arXiv 2507.18071, equations 5 to 7; the sequence is one transition.
- `importance_cap`, `importance_level`: ρ = min(π_old / π_behaviour, `importance_cap`), otherwise ρ = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agl_algorithms.aggregation import token_weights
from agl_algorithms.interface import Samples
from agl_algorithms.options import GrpoOptions
from agl_algorithms.policy_gradient import PolicyGradient
from agl_algorithms.statistics import group_statistics


class Grpo(PolicyGradient):
    """GRPO with its options; see the module for the formulas."""

    options: GrpoOptions

    def __init__(self, options: GrpoOptions) -> None:
        super().__init__(options)
        self.ratio = options.ratio

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the transition's advantage at each of its unmasked tokens, 0 at masked ones.

        A group of one rollout has nothing to compare with: its advantages are 0.
        """
        group = group_statistics(samples)
        advantage_N = group.deviation_N
        if self.options.std_normalization:
            advantage_N = advantage_N / (group.std_N + self.options.epsilon)
        return samples.at_tokens(torch.where(group.comparable_N, advantage_N, 0.0))

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights by `aggregation`, over all groups or those that are not equal."""
        if not self.options.drop_equal_groups:
            return super().weights(samples)
        group = group_statistics(samples)
        return token_weights(samples, self.options.aggregation, group.comparable_N & (group.std_N > 0))
