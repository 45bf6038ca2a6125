"""Imitation: recorded replies (SFT), and the best of the policy's own rollouts (RFT), are made more likely.

    loss = Σ_tokens w · A · (−log π)

with token weights w over what is imitated (`agl_algorithms.policy_gradient.token_weights`). There are no ratio, no clip
and no log-probabilities under the model that wrote the replies.

- SFT: A = 1. The loss is the negative log-likelihood of the responses' tokens; credited values are not read.
- RFT: with v_i the mean credited value of rollout i:

  - `threshold`: A = 1 if v_i ≥ `threshold`, otherwise 0 (ReST, arXiv 2308.08998, section 3; expert iteration);
  - `top_k`: A = 1 for the k rollouts of each group with the largest v_i, of equal ones the first (RAFT, arXiv
    2304.06767, algorithm 1, with k = 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from agl_algorithms.plugin import RftOptions
from agl_algorithms.policy_gradient import Algorithm, Logprobs, Samples, ranked_returns, token_weights, weighted
from agl_core.types import rounding


class Sft(Algorithm):
    """Supervised fine-tuning with its options; see the module for the formulas."""

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] 1 at unmasked tokens, 0 at masked ones."""
        return samples.at_tokens(torch.ones_like(samples.values_N))

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `Algorithm.loss`. Metrics: policy_loss."""
        loss_R = -logprobs.current_R * advantages_R
        return weighted(loss_R, {"policy_loss": loss_R}, weights_R)


class Rft(Sft):
    """Rejection sampling fine-tuning with its options; see the module for the formulas."""

    options: RftOptions

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the A of the transition at its unmasked tokens, 0 at masked ones."""
        return samples.at_tokens(self._advantages(samples))

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights as if the batch had the imitated transitions alone."""
        imitated_R = (self._advantages(samples) > 0)[samples.transition_R]
        return token_weights(replace(samples, mask_R=samples.mask_R & imitated_R), self.options.aggregation)

    def _advantages(self, samples: Samples) -> Tensor:
        """[N] float64, 0 or 1."""
        threshold = self.options.threshold
        least = -math.inf if threshold is None else threshold - rounding(abs(threshold))
        best = [
            rollout
            for returns in ranked_returns(samples)
            for rollout in list(returns)[: self.options.top_k]
            if returns[rollout] >= least
        ]
        best_I = torch.tensor(best, dtype=torch.int64, device=samples.rollout_N.device)
        return torch.isin(samples.rollout_N, best_I).double()
