"""The base of policy-gradient algorithms: everything except the advantages, in which they differ.

    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − low, 1 + high)·A) · ρ  +  β · k3(π ‖ π_initial) )

with token weights w (`agl_algorithms.aggregation`) and ρ = min(π_old / π_behaviour, cap), of the token or of its whole
response, or 1 without a cap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.aggregation import token_weights
from agl_algorithms.divergence import kl_k3, truncated_importance, truncated_sequence_importance
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import PolicyGradientOptions, RatioLevel
from agl_algorithms.surrogate import clipped_surrogate, policy_ratio


class PolicyGradient(ABC):
    """An algorithm whose subclasses define its advantages; see `agl_algorithms.interface.Algorithm`.

    >>> class Advantages(PolicyGradient):
    ...     def advantages(self, samples, values_R=None):
    ...         return samples.at_tokens(samples.values_N)
    >>> Advantages(PolicyGradientOptions(beta=0.1)).needs_reference
    True
    """

    needs_critic = False
    ratio: RatioLevel = "token"
    """One ratio for each token, or one for each transition."""

    def __init__(self, options: PolicyGradientOptions) -> None:
        self.options = options
        self.epochs = options.epochs
        self.minibatches = options.minibatches
        self.needs_reference = options.beta > 0
        self.clip = options.clip_range
        """The bounds of the ratio below and above 1."""

    @abstractmethod
    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] advantages, 0 at masked tokens; `Samples.at_tokens` makes them from one number per transition."""

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: transitions with a weighted token that has an advantage, or (with a KL term) any weighted token."""
        counts_R = self.weights(samples) > 0
        return transitions_of(samples, counts_R if self.needs_reference else counts_R & (advantages_R != 0))

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights by `aggregation`."""
        return token_weights(samples, self.options.aggregation)

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens.

        Metrics: policy_loss, kl_behaviour (k3 of KL(behaviour ‖ current), because the behaviour policy sampled the
        tokens), ratio_mean, ratio_max, clip_fraction; with `beta` kl_reference (k3 of KL(current ‖ initial), as in the
        loss), with `importance_cap` importance_mean.
        """
        ratio_R = policy_ratio(samples, logprobs, self.ratio)
        surrogate = clipped_surrogate(ratio_R, advantages_R, *self.clip)
        policy_R = surrogate.loss_R
        per_token = {
            "kl_behaviour": kl_k3(logprobs.behaviour_R, logprobs.current_R),
            "ratio_mean": ratio_R,
            "clip_fraction": surrogate.clipped_R.to(ratio_R.dtype),
        }
        if self.options.importance_cap is not None:
            importance_R = self._importance(samples, logprobs, self.options.importance_cap)
            policy_R = policy_R * importance_R
            per_token["importance_mean"] = importance_R
        loss_R = policy_R
        per_token["policy_loss"] = policy_R
        if self.needs_reference:
            if logprobs.reference_R is None:
                raise ValueError("A loss with beta > 0 needs the log-probabilities of the reference (needs_reference).")
            kl_R = kl_k3(logprobs.current_R, logprobs.reference_R)
            loss_R = loss_R + self.options.beta * kl_R
            per_token["kl_reference"] = kl_R
        metrics = {name: (weights_R * value_R).sum().detach() for name, value_R in per_token.items()}
        metrics["ratio_max"] = torch.where(weights_R > 0, ratio_R, 0.0).max().detach()
        return (weights_R * loss_R).sum(), metrics

    def _importance(self, samples: Samples, logprobs: Logprobs, cap: float) -> Tensor:
        if self.options.importance_level == "sequence":
            return truncated_sequence_importance(samples, logprobs.old_R, logprobs.behaviour_R, cap)
        return truncated_importance(logprobs.old_R, logprobs.behaviour_R, cap)


def transitions_of(samples: Samples, counts_R: Tensor) -> Tensor:
    """[N] bool: transitions with a token for which `counts_R` [R] bool holds."""
    found_N = torch.zeros(samples.values_N.numel(), dtype=torch.bool, device=counts_R.device)
    return found_N.index_fill(0, samples.transition_R[counts_R], True)
