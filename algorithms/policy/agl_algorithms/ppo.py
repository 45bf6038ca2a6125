"""PPO: Proximal Policy Optimization with a learned critic (arXiv 1707.06347; advantages by GAE, arXiv 1506.02438).

By default each transition is separate: GAE runs over the tokens of its response, and its credited return is the reward
of the last token. With `across_calls` GAE runs over the calls of an episode, on credited rewards: a call is one action,
its value is the critic's at the end of its prompt, and all its tokens share its advantage. Both are in
`agl_algorithms.gae`. With values V before the update and GAE's A:

    target       = A + V
    policy loss  = the clipped surrogate over A, whitened over the batch (`agl_algorithms.policy_gradient`, `whitened`)
    value loss   = Σ w · ½ · max( (V_new − target)², (V + clip(V_new − V, ±value_clip) − target)² )

The value loss weighs every token like the policy loss; with `across_calls` a transition's whole weight is at the end of
its prompt. There is no KL term unless `beta` is above 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.gae import gae_across_calls, gae_in_responses
from agl_algorithms.interface import Samples
from agl_algorithms.options import PpoOptions
from agl_algorithms.policy_gradient import PolicyGradient, transitions_of
from agl_algorithms.statistics import segment_sum, whitened


class Ppo(PolicyGradient):
    """PPO with its options; see the module for the formulas."""

    options: PpoOptions
    needs_critic = True

    def __init__(self, options: PpoOptions) -> None:
        super().__init__(options)
        self.critic_learning_rate = options.critic_learning_rate
        self.critic_epochs = options.critic_epochs

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] advantages of unmasked tokens, 0 at masked ones; `values_R` are the critic's before each token."""
        if values_R is None:
            raise ValueError("PPO needs the critic's values (needs_critic).")
        advantage_R = self._gae(samples, values_R) * samples.mask_R
        if self.options.whitening != "off":
            advantage_R = whitened(advantage_R, samples, self.options.whitening)
        return advantage_R.to(samples.behaviour_R.dtype)

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: every transition with a weight, because the critic learns from it."""
        return transitions_of(samples, self.weights(samples) > 0)

    def value_targets(self, samples: Samples, values_R: Tensor) -> Tensor:
        """[R] the critic's targets where `value_weights` are above 0: its value plus GAE's plain advantage."""
        return (self._gae(samples, values_R) + values_R).to(values_R.dtype)

    def value_weights(self, samples: Samples) -> Tensor:
        """[R] weights of the value loss: those of the tokens, or across calls their sum at the end of the prompt."""
        weights_R = self.weights(samples)
        if not self.options.across_calls:
            return weights_R
        weight_N = segment_sum(weights_R, samples.transition_R, samples.values_N.numel())
        return torch.zeros_like(weights_R).index_copy(0, _first_token_N(samples), weight_N)

    def value_loss(
        self, current_R: Tensor, old_R: Tensor, targets_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens; see the function of this name."""
        return value_loss(current_R, old_R, targets_R, weights_R, self.options.value_clip)

    def _gae(self, samples: Samples, values_R: Tensor) -> Tensor:
        """[R]; across calls a call's advantage at each of its tokens."""
        gamma, lam = self.options.gamma, self.options.lam
        if not self.options.across_calls:
            return gae_in_responses(samples, values_R, gamma=gamma, lam=lam)
        advantage_N = gae_across_calls(samples, values_R[_first_token_N(samples)], gamma=gamma, lam=lam)
        return advantage_N[samples.transition_R]


def value_loss(
    current_R: Tensor, old_R: Tensor, targets_R: Tensor, weights_R: Tensor, clip: float | None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Σ w · ½ · max((V_new − target)², (V_clipped − target)²), V_clipped within `clip` of the value before the update.

    Metrics, sums over tokens of weight × value: value_loss, value_mean, and with `clip` value_clip_fraction.

    >>> value_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]), 0.5)[0]
    tensor(0.1250)
    """
    error_R = (current_R - targets_R).square()
    per_token = {"value_mean": current_R}
    if clip is not None:
        bounded_R = old_R + (current_R - old_R).clamp(-clip, clip)
        bounded_error_R = (bounded_R - targets_R).square()
        per_token["value_clip_fraction"] = (bounded_error_R > error_R).to(error_R.dtype)
        error_R = torch.maximum(error_R, bounded_error_R)
    loss_R = 0.5 * error_R
    per_token["value_loss"] = loss_R
    metrics = {name: (weights_R * value_R).sum().detach() for name, value_R in per_token.items()}
    return (weights_R * loss_R).sum(), metrics


def _first_token_N(samples: Samples) -> Tensor:
    """[N] where each response starts, masked or not: the value before it is that of the prompt."""
    lengths_N = torch.bincount(samples.transition_R, minlength=samples.values_N.numel())
    return lengths_N.cumsum(0) - lengths_N
