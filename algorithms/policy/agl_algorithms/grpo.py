"""GRPO: Group Relative Policy Optimization, and the variants practitioners use.

For transition t of rollout i with credited value v_it, group mean μ and standard deviation σ
(`agl_algorithms.statistics.group_statistics`), token weights w (`agl_algorithms.aggregation.token_weights`):

    A_it = (v_it − μ) / (σ + ε)
    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − clip, 1 + clip_high)·A) · ρ  +  β · k3(π ‖ π_initial) )

- GRPO: DeepSeekMath, arXiv 2402.03300, equations 3 and 4.
- `clip_high`, `drop_equal_groups`, `aggregation = "token-mean"`: DAPO, arXiv 2503.14476, equations 8, 10 and 11.
- `std_normalization = false`: Dr. GRPO, arXiv 2503.20783, section 3.2.
- `ratio = "sequence"`: GSPO, arXiv 2507.18071, equations 5 to 7; the sequence is one transition.
- `importance_threshold`, `importance_level`: ρ = min(π_old / π_behaviour, threshold), otherwise ρ = 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.aggregation import token_weights
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.objective import PolicyObjective, contributing
from agl_algorithms.options import GrpoOptions
from agl_algorithms.statistics import group_statistics


class Grpo:
    """GRPO with its options; see the module for the formulas."""

    needs_critic = False

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.epochs = options.epochs
        self.minibatches = options.minibatches
        self.needs_reference = options.beta > 0
        self._objective = PolicyObjective.per_token(options, options.beta)
        if options.ratio == "sequence":
            self._objective = PolicyObjective(
                options.sequence_clip,
                options.sequence_clip_high,
                options.beta,
                options.importance_threshold,
                options.importance_level,
                options.ratio,
            )

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the transition's advantage at each of its unmasked tokens, 0 at masked ones.

        A group of one rollout has nothing to compare with: its advantages are 0.
        """
        group = group_statistics(samples)
        advantage_N = group.deviation_N
        if self.options.std_normalization:
            advantage_N = advantage_N / (group.std_N + self.options.epsilon)
        advantage_N = torch.where(group.comparable_N, advantage_N, 0.0)
        return (advantage_N[samples.transition_R] * samples.mask_R).to(samples.behaviour_R.dtype)

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: what has an advantage, or (with a KL term) a weight."""
        return contributing(samples, self.weights(samples), advantages_R, kl=self.needs_reference)

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights by `aggregation`, over all groups or those that are not equal."""
        unequal_N = None
        if self.options.drop_equal_groups:
            group = group_statistics(samples)
            unequal_N = group.comparable_N & (group.std_N > 0)
        return token_weights(samples, self.options.aggregation, unequal_N)

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens and its metrics; see `agl_algorithms.objective.PolicyObjective`."""
        return self._objective(samples, logprobs, advantages_R, weights_R)
