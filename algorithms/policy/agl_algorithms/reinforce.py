"""REINFORCE++: the return minus the batch's mean, over the batch's standard deviation (arXiv 2501.03262).

For transition t with return G_t at each of its unmasked tokens, mean μ and standard deviation σ of the batch
(`agl_algorithms.policy_gradient.whitened`):

    A_t  = (G_t − μ) / √(σ² + 1e-8)

- G_t is the credited return, or with `across_calls` the discounted sum of credited rewards from call t on.
- The loss is the clipped surrogate (`agl_algorithms.policy_gradient`), its gradient is clipped by the optimizer.
- Without whitening A_t is G_t: replies are imitated in proportion to their returns.
- There are no critic and no groups, and no KL unless `beta` is above 0. The paper subtracts the KL from the rewards,
  token by token; here it is a term of the loss, as in GRPO, so returns stay what credit made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agl_algorithms.plugin import ReinforceOptions
from agl_algorithms.policy_gradient import PolicyGradient, Samples, whitened
from agl_algorithms.ppo import gae_across_calls


class Reinforce(PolicyGradient):
    """REINFORCE++ with its options; see the module for the formulas."""

    options: ReinforceOptions

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the transition's advantage at each of its unmasked tokens, 0 at masked ones."""
        return_N = samples.values_N.to(torch.float64)
        if self.options.across_calls:
            # With λ = 1 and no critic, GAE is the discounted sum: G_t = r_t + γ · G_{t+1}.
            return_N = gae_across_calls(samples, torch.zeros_like(return_N), gamma=self.options.gamma, lam=1.0)
        if self.options.whitening == "off":
            return samples.at_tokens(return_N)
        advantage_R = whitened(return_N[samples.transition_R], samples, self.options.whitening)
        return advantage_R.to(samples.behaviour_R.dtype)
