"""The clipped surrogate objective and the ratio in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agl_algorithms.divergence import log_ratio
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import RatioLevel
from agl_algorithms.statistics import segment_sum


class Surrogate(NamedTuple):
    """Both [R]."""

    loss_R: Tensor
    clipped_R: Tensor
    """bool: the clipped term counts, so the token has no gradient."""


def policy_ratio(samples: Samples, logprobs: Logprobs, level: RatioLevel) -> Tensor:
    """[R] current / old: of each token, or of each transition and repeated over its tokens.

    By transition it is the geometric mean over the unmasked tokens (GSPO, arXiv 2507.18071, equation 7):
    exp(1/|a_t| · Σ (current − old)).
    """
    log_ratio_R = log_ratio(logprobs.current_R, logprobs.old_R)
    if level == "sequence":
        transitions = samples.values_N.numel()
        mask_R = samples.mask_R.to(log_ratio_R.dtype)
        tokens_N = segment_sum(mask_R, samples.transition_R, transitions).clamp(min=1)
        mean_N = segment_sum(log_ratio_R * mask_R, samples.transition_R, transitions) / tokens_N
        log_ratio_R = mean_N[samples.transition_R]
    return log_ratio_R.exp()


def clipped_surrogate(ratio_R: Tensor, advantages_R: Tensor, low: float, high: float) -> Surrogate:
    """−min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) for each token (PPO, arXiv 1707.06347, equation 7).

    >>> clipped_surrogate(torch.tensor([1.5]), torch.tensor([2.0]), 0.2, 0.2).loss_R
    tensor([-2.4000])
    """
    plain_R = ratio_R * advantages_R
    bounded_R = ratio_R.clamp(1 - low, 1 + high) * advantages_R
    return Surrogate(-torch.minimum(plain_R, bounded_R), bounded_R < plain_R)
