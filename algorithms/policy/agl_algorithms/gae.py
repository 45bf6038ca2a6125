"""Generalized advantage estimation (arXiv 1506.02438, equation 16): inside responses, or across an episode's calls.

Inside a response a step is one unmasked token. Across calls a step is one call. The choices of a call (`n` > 1) share
its turn and are parallel: no choice is in another's future, and each is followed by the mean over the next call's
choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agl_algorithms.interface import Samples
from agl_algorithms.statistics import segment_count


def gae_in_responses(samples: Samples, values_R: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[R] float64 advantages of unmasked tokens, 0 at masked ones; `values_R` are those before each token.

        δ_k = r_k + γ · V_{k+1} − V_k        A_k = δ_k + γ · λ · A_{k+1}

    k counts the unmasked tokens of one response. The transition's credited value is the reward of the last of them,
    the others have none; after it V and A are 0.
    """
    transitions = samples.values_N.numel()
    unmasked = samples.mask_R.nonzero()[:, 0]
    lengths_N = segment_count(samples.transition_R[unmasked], transitions).to(torch.int64)
    ends_N = lengths_N.cumsum(0)
    values_R = values_R.to(torch.float64)
    advantages_R = torch.zeros_like(values_R)
    next_value_N = torch.zeros(transitions, dtype=torch.float64, device=values_R.device)
    next_advantage_N = torch.zeros_like(next_value_N)
    for from_end in range(int(lengths_N.max()) if transitions else 0):
        rows = (lengths_N > from_end).nonzero()[:, 0]
        tokens = unmasked[ends_N[rows] - 1 - from_end]
        ahead = samples.values_N[rows].to(torch.float64) if from_end == 0 else gamma * next_value_N[rows]
        next_advantage_N[rows] = ahead - values_R[tokens] + gamma * lam * next_advantage_N[rows]
        next_value_N[rows] = values_R[tokens]
        advantages_R[tokens] = next_advantage_N[rows]
    return advantages_R


def gae_across_calls(samples: Samples, values_N: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[N] float64 advantages of calls; `values_N` [N] are those of their prompts, the credited values are rewards.

        δ_t = r_t + γ · V_{t+1} − V_t        A_t = δ_t + γ · λ · A_{t+1}

    t+1 is the rollout's next call in the batch; after the last one V and A are 0. Calls that are not in the batch
    belong to the environment of this step: their rewards are in r_t (`agl_core.learning.propagation`).
    """
    rewards, values = samples.values_N.tolist(), values_N.tolist()
    choices_of: dict[tuple[int, int], list[int]] = {}
    for i, call in enumerate(zip(samples.rollout_N.tolist(), samples.turn_N.tolist(), strict=True)):
        choices_of.setdefault(call, []).append(i)
    advantages = [0.0] * len(rewards)
    later: tuple[int, int] | None = None
    for call in sorted(choices_of, reverse=True):
        choices = choices_of[call]
        ahead, trace = 0.0, 0.0
        if later is not None and later[0] == call[0]:
            after = choices_of[later]
            ahead = gamma * sum(values[i] for i in after) / len(after)
            trace = gamma * lam * sum(advantages[i] for i in after) / len(after)
        for i in choices:
            advantages[i] = rewards[i] + ahead - values[i] + trace
        later = call
    return torch.tensor(advantages, dtype=torch.float64, device=samples.values_N.device)


def discounted_sums(samples: Samples, *, gamma: float) -> Tensor:
    """[N] float64 the discounted sum of rewards from each call on: G_t = r_t + γ · G_{t+1}."""
    nothing_N = torch.zeros_like(samples.values_N)
    return gae_across_calls(samples, nothing_N, gamma=gamma, lam=1.0)
