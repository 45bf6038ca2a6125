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
- `importance_threshold`: ρ = min(π_old / π_behaviour, threshold), otherwise ρ = 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.aggregation import token_weights
from agl_algorithms.divergence import kl_k3, truncated_importance
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import GrpoOptions
from agl_algorithms.statistics import group_statistics
from agl_algorithms.surrogate import clipped_surrogate, policy_ratio


class Grpo:
    """GRPO with its options; see the module for the formulas."""

    needs_critic = False

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.epochs = options.epochs
        self.minibatches = options.minibatches
        self.needs_reference = options.beta > 0
        if options.ratio == "sequence":
            self._clip = (options.sequence_clip, options.sequence_clip_high)
        else:
            self._clip = (options.clip, options.clip if options.clip_high is None else options.clip_high)

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
        counts_R = self.weights(samples) > 0
        if not self.needs_reference:
            counts_R = counts_R & (advantages_R != 0)
        kept_N = torch.zeros(samples.values_N.numel(), dtype=torch.bool, device=counts_R.device)
        return kept_N.index_fill(0, samples.transition_R[counts_R], True)

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
        """The weighted sum over tokens; see `agl_algorithms.interface.Algorithm.loss`.

        Metrics: policy_loss, kl_behaviour (k3, current to behaviour), ratio_mean, ratio_max, clip_fraction; with
        `beta` kl_reference, with `importance_threshold` importance_mean.
        """
        ratio_R = policy_ratio(samples, logprobs, self.options.ratio)
        surrogate = clipped_surrogate(ratio_R, advantages_R, *self._clip)
        policy_R = surrogate.loss_R
        per_token = {
            "kl_behaviour": kl_k3(logprobs.current_R, logprobs.behaviour_R),
            "ratio_mean": ratio_R,
            "clip_fraction": surrogate.clipped_R.to(ratio_R.dtype),
        }
        if self.options.importance_threshold is not None:
            importance_R = truncated_importance(logprobs.old_R, logprobs.behaviour_R, self.options.importance_threshold)
            policy_R = policy_R * importance_R
            per_token["importance_mean"] = importance_R
        loss_R = policy_R
        per_token["policy_loss"] = policy_R
        if self.needs_reference:
            if logprobs.reference_R is None:
                raise ValueError("GRPO with beta > 0 needs the log-probabilities of the reference (needs_reference).")
            kl_R = kl_k3(logprobs.current_R, logprobs.reference_R)
            loss_R = loss_R + self.options.beta * kl_R
            per_token["kl_reference"] = kl_R
        metrics = {name: (weights_R * value_R).sum().detach() for name, value_R in per_token.items()}
        metrics["ratio_max"] = torch.where(weights_R > 0, ratio_R, 0.0).max().detach()
        return (weights_R * loss_R).sum(), metrics
