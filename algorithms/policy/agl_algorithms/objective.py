"""The policy loss that the algorithms share: clipped surrogate, importance weights, KL to the initial weights.

    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − low, 1 + high)·A) · ρ  +  β · k3(π ‖ π_initial) )

with token weights w and ρ = min(π_old / π_behaviour, threshold), of the token or of its whole response, or 1 without a
threshold. The algorithms differ in A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agl_algorithms.divergence import kl_k3, truncated_importance, truncated_sequence_importance
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import RatioLevel, SurrogateOptions
from agl_algorithms.surrogate import clipped_surrogate, policy_ratio


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The loss with its settings; call it with a batch."""

    low: float
    high: float
    beta: float
    importance_threshold: float | None
    importance_level: RatioLevel = "token"
    ratio: RatioLevel = "token"

    @classmethod
    def per_token(cls, options: SurrogateOptions, beta: float) -> PolicyObjective:
        """With one ratio for each token."""
        high = options.clip if options.clip_high is None else options.clip_high
        return cls(options.clip, high, beta, options.importance_threshold, options.importance_level)

    def __call__(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens; see `agl_algorithms.interface.Algorithm.loss`.

        Metrics: policy_loss, kl_behaviour (k3, current to behaviour), ratio_mean, ratio_max, clip_fraction; with
        `beta` kl_reference, with `importance_threshold` importance_mean.
        """
        ratio_R = policy_ratio(samples, logprobs, self.ratio)
        surrogate = clipped_surrogate(ratio_R, advantages_R, self.low, self.high)
        policy_R = surrogate.loss_R
        per_token = {
            "kl_behaviour": kl_k3(logprobs.current_R, logprobs.behaviour_R),
            "ratio_mean": ratio_R,
            "clip_fraction": surrogate.clipped_R.to(ratio_R.dtype),
        }
        if self.importance_threshold is not None:
            importance_R = self._importance(samples, logprobs, self.importance_threshold)
            policy_R = policy_R * importance_R
            per_token["importance_mean"] = importance_R
        loss_R = policy_R
        per_token["policy_loss"] = policy_R
        if self.beta > 0:
            if logprobs.reference_R is None:
                raise ValueError("A loss with beta > 0 needs the log-probabilities of the reference (needs_reference).")
            kl_R = kl_k3(logprobs.current_R, logprobs.reference_R)
            loss_R = loss_R + self.beta * kl_R
            per_token["kl_reference"] = kl_R
        metrics = {name: (weights_R * value_R).sum().detach() for name, value_R in per_token.items()}
        metrics["ratio_max"] = torch.where(weights_R > 0, ratio_R, 0.0).max().detach()
        return (weights_R * loss_R).sum(), metrics

    def _importance(self, samples: Samples, logprobs: Logprobs, threshold: float) -> Tensor:
        if self.importance_level == "sequence":
            return truncated_sequence_importance(samples, logprobs.old_R, logprobs.behaviour_R, threshold)
        return truncated_importance(logprobs.old_R, logprobs.behaviour_R, threshold)


def contributing(samples: Samples, weights_R: Tensor, advantages_R: Tensor, *, kl: bool) -> Tensor:
    """[N] bool: transitions with a weighted token that has an advantage, or (with a KL term) any weighted token."""
    counts_R = weights_R > 0
    return transitions_of(samples, counts_R if kl else counts_R & (advantages_R != 0))


def transitions_of(samples: Samples, counts_R: Tensor) -> Tensor:
    """[N] bool: transitions with a token for which `counts_R` [R] bool holds."""
    found_N = torch.zeros(samples.values_N.numel(), dtype=torch.bool, device=counts_R.device)
    return found_N.index_fill(0, samples.transition_R[counts_R], True)
