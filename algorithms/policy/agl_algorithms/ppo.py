"""PPO: Proximal Policy Optimization with a learned critic (arXiv 1707.06347; advantages by GAE, arXiv 1506.02438).

By default each transition is separate: GAE runs over the tokens of its response, and its credited return is the reward
of the last token. With `across_calls` GAE runs over the calls of an episode, on credited rewards: a call is one action,
its value is the critic's at the end of its prompt, and all its tokens share its advantage. With values V before the
update and GAE's A:

    target       = A + V
    policy loss  = the clipped surrogate over A, whitened over the batch (`agl_algorithms.policy_gradient`, `whitened`)
    value loss   = Σ w · ½ · max( (V_new − target)², (V + clip(V_new − V, ±0.2) − target)² )

The value loss weighs every token like the policy loss; with `across_calls` a transition's whole weight is at the end of
its prompt. There is no KL term unless `beta` is above 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.plugin import PpoOptions
from agl_algorithms.policy_gradient import PolicyGradient, Samples, weighted, whitened
from agl_core.types import rounding
from agl_core.types.episodes import Moment, gae


class Ppo(PolicyGradient):
    """PPO with its options; see the module. A token's value is that of the state before it."""

    options: PpoOptions
    needs_critic = True
    value_clip = 0.2
    """How far a value may move in one update before its loss stops pulling."""

    def __init__(self, options: PpoOptions) -> None:
        super().__init__(options)
        self.critic_learning_rate = options.critic_learning_rate
        self.critic_epochs = options.critic_epochs
        """The critic's passes over the batch in one update, each of `minibatches` optimizer steps."""

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] advantages of unmasked tokens, 0 at masked ones; `values_R` are the critic's before each token."""
        assert values_R is not None, "needs_critic asks for them"
        advantage_R = self._gae(samples, values_R) * samples.mask_R
        if self.options.whitening != "off":
            advantage_R = whitened(advantage_R, samples, self.options.whitening)
        return advantage_R.to(samples.behaviour_R.dtype)

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: every transition with a weight, because the critic learns from it."""
        return samples.sums(self.weights(samples)) > 0

    def value_targets(self, samples: Samples, values_R: Tensor) -> Tensor:
        """[R] the critic's targets where `value_weights` are above 0: its value plus GAE's plain advantage."""
        return (self._gae(samples, values_R) + values_R).to(values_R.dtype)

    def value_weights(self, samples: Samples) -> Tensor:
        """[R] weights of the value loss: those of the tokens, or across calls their sum at the end of the prompt."""
        weights_R = self.weights(samples)
        if not self.options.across_calls:
            return weights_R
        weight_N = samples.sums(weights_R).to(weights_R.dtype)
        return torch.zeros_like(weights_R).index_copy(0, _first_token_N(samples), weight_N)

    def value_loss(
        self, current_R: Tensor, old_R: Tensor, targets_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The value loss above; metrics: value_loss, value_mean and value_clip_fraction."""
        error_R = (current_R - targets_R).square()
        bounded_R = old_R + (current_R - old_R).clamp(-self.value_clip, self.value_clip)
        bounded_error_R = (bounded_R - targets_R).square()
        loss_R = 0.5 * torch.maximum(error_R, bounded_error_R)
        clipped_R = (bounded_error_R > error_R).to(error_R.dtype)
        per_token = {"value_mean": current_R, "value_clip_fraction": clipped_R, "value_loss": loss_R}
        return weighted(loss_R, per_token, weights_R)

    def _gae(self, samples: Samples, values_R: Tensor) -> Tensor:
        """[R]; across calls a call's advantage at each of its tokens."""
        gamma, lam = self.options.gamma, self.options.lam
        if not self.options.across_calls:
            return gae_in_responses(samples, values_R, gamma=gamma, lam=lam)
        advantage_N = gae_across_calls(samples, values_R[_first_token_N(samples)], gamma=gamma, lam=lam)
        return advantage_N[samples.transition_R]


def gae_in_responses(samples: Samples, values_R: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[R] float64 advantages of unmasked tokens, 0 at masked ones; `values_R` are those before each token.

        δ_k = r_k + γ · V_{k+1} − V_k        A_k = δ_k + γ · λ · A_{k+1}

    k counts the unmasked tokens of one response (arXiv 1506.02438, equation 16). The transition's credited value is
    the reward of the last of them, the others have none; after it V and A are 0.
    """
    unmasked = samples.mask_R.nonzero()[:, 0]
    lengths_N = samples.sums(samples.mask_R).to(torch.int64)
    ends_N = lengths_N.cumsum(0)
    values_R = values_R.to(torch.float64)
    advantages_R = torch.zeros_like(values_R)
    next_value_N = torch.zeros(len(samples), dtype=torch.float64, device=values_R.device)
    next_advantage_N = torch.zeros_like(next_value_N)
    for from_end in range(int(lengths_N.max()) if len(samples) else 0):
        rows = (lengths_N > from_end).nonzero()[:, 0]
        tokens = unmasked[ends_N[rows] - 1 - from_end]
        ahead = samples.values_N[rows].to(torch.float64) if from_end == 0 else gamma * next_value_N[rows]
        next_advantage_N[rows] = ahead - values_R[tokens] + gamma * lam * next_advantage_N[rows]
        next_value_N[rows] = values_R[tokens]
        advantages_R[tokens] = next_advantage_N[rows]
    return advantages_R


def gae_across_calls(samples: Samples, values_N: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[N] float64 advantages of calls; `values_N` [N] are those of their prompts, the credited values are rewards.

    It is `agl_core.types.episodes.gae` over each rollout, whose calls that are not in the batch are the environment.
    """
    numbers, turns = samples.rollout_N.tolist(), samples.turn_N.tolist()
    rewards, values, advantages = samples.values_N.tolist(), values_N.tolist(), [0.0] * len(samples)
    rows = defaultdict[int, list[int]](list)
    for i, number in enumerate(numbers):
        rows[number].append(i)
    for number, own in rows.items():
        known = samples.calls[number] if samples.calls else [Moment(turns[i], (), 0.0) for i in own]
        threads, present = {moment.turn: moment.thread for moment in known}, {turns[i] for i in own}
        calls = [Moment(turns[i], threads[turns[i]], rewards[i], values[i]) for i in own]
        calls += [moment for moment in known if moment.turn not in present]
        for i, advantage in zip(own, gae(calls, gamma, lam), strict=False):
            advantages[i] = advantage
    return torch.tensor(advantages, dtype=torch.float64, device=samples.values_N.device)


def explained_variance(values_R: Tensor, targets_R: Tensor, weights_R: Tensor) -> float:
    """1 − Var(target − value) / Var(target), variances by weight; NaN if the targets are all equal.

    1: the critic predicts every target; 0: no better than a constant; below 0: worse than a constant.
    """

    def variance(of_R: Tensor) -> Tensor:
        mean = (share_R * of_R).sum()
        return (share_R * (of_R - mean).square()).sum()

    counted_R = weights_R > 0
    share_R = weights_R[counted_R].to(torch.float64)
    share_R = share_R / share_R.sum()
    target_R = targets_R[counted_R].to(torch.float64)
    if not target_R.numel() or target_R.max() - target_R.min() <= rounding(target_R.abs().max()):
        return float("nan")
    error = variance(target_R - values_R[counted_R].to(torch.float64))
    return float(1 - error / variance(target_R))


def _first_token_N(samples: Samples) -> Tensor:
    """[N] where each response starts, masked or not: the value before it is that of the prompt."""
    lengths_N = torch.bincount(samples.transition_R, minlength=len(samples))
    return lengths_N.cumsum(0) - lengths_N
