"""REINFORCE++: the return minus the batch's mean, over the batch's standard deviation (arXiv 2501.03262).

For transition t with return G_t at each of its unmasked tokens, mean μ and standard deviation σ of the batch
(`agl_algorithms.statistics.whitened`):

    A_t  = (G_t − μ) / √(σ² + 1e-8)

- G_t is the credited return, or with `across_calls` the discounted sum of credited rewards from call t on.
- The loss is the clipped surrogate (`agl_algorithms.objective`), its gradient is clipped by the optimizer.
- No critic, no groups, and no KL unless `beta` asks for it. The paper subtracts the KL from the rewards, token by
  token; here it is a term of the loss, as in GRPO, so that returns stay what credit made of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.aggregation import token_weights
from agl_algorithms.gae import discounted_sums
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.objective import PolicyObjective, contributing
from agl_algorithms.options import ReinforceOptions
from agl_algorithms.statistics import whitened


class Reinforce:
    """REINFORCE++ with its options; see the module for the formulas."""

    needs_critic = False

    def __init__(self, options: ReinforceOptions) -> None:
        self.options = options
        self.epochs = options.epochs
        self.minibatches = options.minibatches
        self.needs_reference = options.beta > 0
        self._objective = PolicyObjective.per_token(options, options.beta)

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the transition's advantage at each of its unmasked tokens, 0 at masked ones.

        A batch of equal returns has exactly zero advantages.
        """
        return_N = samples.values_N.to(torch.float64)
        if self.options.across_calls:
            return_N = discounted_sums(samples, gamma=self.options.gamma, count_untrained=self.options.count_untrained)
        advantage_R = whitened(return_N[samples.transition_R], samples, self.options.whitening)
        return advantage_R.to(samples.behaviour_R.dtype)

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: what has an advantage, or (with a KL term) a weight."""
        return contributing(samples, self.weights(samples), advantages_R, kl=self.needs_reference)

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights by `aggregation`."""
        return token_weights(samples, self.options.aggregation)

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens and its metrics; see `agl_algorithms.objective.PolicyObjective`."""
        return self._objective(samples, logprobs, advantages_R, weights_R)
