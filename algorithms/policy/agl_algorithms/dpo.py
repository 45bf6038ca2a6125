"""DPO: Direct Preference Optimization (arXiv 2305.18290, equation 7), on pairs of rollouts of one task.

For a pair of a better rollout w and a worse one l of a group, with β and the initial weights as the reference:

    h_i  = Σ_tokens of rollout i  (log π − log π_initial)
    Δ    = β · (h_w − h_l)
    loss = mean over pairs of −log σ(Δ)

The tokens are those of all trained calls of a rollout. A rollout's return is the mean of its credited values.

The gradient is exact, though micro-batches do not see pairs: an update is one optimizer step, and before it each
token gets its pairs' derivatives as its advantage, with P pairs and the weight 1/P:

    A_i        = Σ_pairs where i is better β · σ(−Δ)  −  Σ_pairs where i is worse β · σ(−Δ)
    −Σ A · log π / P   has the gradient of the loss
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agl_algorithms.plugin import DpoOptions
from agl_algorithms.policy_gradient import Algorithm, Logprobs, Samples, ranked_returns, segment_sum, weighted
from agl_core.types import rounding


class Dpo(Algorithm):
    """DPO with its options; see the module for the formulas."""

    needs_reference = True
    needs_scores = True

    def __init__(self, options: DpoOptions) -> None:
        self.beta = options.beta
        self.epochs = self.minibatches = 1  # After a first step, the derivatives of the pairs would be others.

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] zeros: `rescore` has them."""
        return torch.zeros_like(samples.behaviour_R)

    def weights(self, samples: Samples) -> Tensor:
        """[R] 1 / pairs at the unmasked tokens of rollouts that are in one, else 0."""
        better_P, worse_P = preference_pairs(samples)
        paired_N = torch.isin(samples.rollout_N, torch.cat([better_P, worse_P]))
        return samples.at_tokens(paired_N / max(1, len(better_P)))

    def rescore(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[R] the derivatives A of the module's docstring, at unmasked tokens.

        Metrics over pairs: loss, pair_accuracy (the share whose better rollout has the larger h), pair_margin (the mean
        Δ), and pairs, their number.
        """
        assert logprobs.reference_R is not None, "needs_reference asks for it"
        better_P, worse_P = preference_pairs(samples)
        rollouts = int(samples.rollout_N.max()) + 1
        ratio_R = (logprobs.old_R - logprobs.reference_R).masked_fill(~samples.mask_R, 0.0)
        ratio_I = segment_sum(samples.sums(ratio_R), samples.rollout_N, rollouts)
        delta_P = self.beta * (ratio_I[better_P] - ratio_I[worse_P])
        pull_P = self.beta * torch.sigmoid(-delta_P)
        advantage_I = segment_sum(pull_P, better_P, rollouts) - segment_sum(pull_P, worse_P, rollouts)
        return samples.at_tokens(advantage_I[samples.rollout_N]), {
            "loss": -logsigmoid(delta_P).mean(),
            "pair_accuracy": (delta_P > 0).to(delta_P.dtype).mean(),
            "pair_margin": delta_P.mean(),
            "pairs": torch.tensor(len(delta_P)),
        }

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Σ w · (−A · log π), which has the gradient of DPO's loss; its value is not that loss."""
        return weighted(-advantages_R * logprobs.current_R, {}, weights_R)


def preference_pairs(samples: Samples) -> tuple[Tensor, Tensor]:
    """[P] the better and [P] the worse rollout of each pair, int64, by their numbers in `rollout_N`.

    A pair is the best and the worst rollout of a group, if their returns differ by more than rounding. A rollout
    without an unmasked token is in no pair.
    """
    pairs = []
    for returns in ranked_returns(samples):
        ranked = list(returns)
        better, worse = ranked[0], ranked[-1]
        if returns[better] - returns[worse] > rounding(max(map(abs, returns.values()))):
            pairs.append((better, worse))
    better_P, worse_P = torch.tensor(pairs, dtype=torch.int64, device=samples.rollout_N.device).reshape(-1, 2).T
    return better_P, worse_P
