"""Estimators that compare two policies token by token, from the log-probabilities of what was sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from agl_algorithms.interface import Samples
from agl_algorithms.statistics import segment_sum

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp, so a token that became impossible cannot overflow the sum."""


def log_ratio(current_R: Tensor, other_R: Tensor) -> Tensor:
    """[R] current − other, clamped to ±`MAX_LOG_RATIO`."""
    return (current_R - other_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k3(sampling_R: Tensor, other_R: Tensor) -> Tensor:
    """[R] Schulman's k3 estimate of KL(sampling ‖ other), never negative (arXiv 2402.03300, equation 4).

        k3 = exp(other − sampling) − (other − sampling) − 1

    Its mean is this KL if the tokens were drawn from the first policy. For tokens of another policy it is biased, and
    for tokens of `other_R` the exponential has no bound.

    >>> kl_k3(torch.tensor([0.0]), torch.tensor([0.0])).item()
    0.0
    """
    difference_R = log_ratio(other_R, sampling_R)
    return torch.expm1(difference_R) - difference_R


def truncated_importance(old_R: Tensor, behaviour_R: Tensor, threshold: float) -> Tensor:
    """[R] min(exp(old − behaviour), threshold), without gradient.

    It corrects for tokens that were sampled by an earlier version of the policy, or by kernels that round differently.
    The truncation bounds the variance (Ionides, 2008; IMPALA, arXiv 1802.01561, section 4.1).

    >>> truncated_importance(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0]), 2.0).tolist()
    [1.0, 2.0]
    """
    return log_ratio(old_R, behaviour_R).exp().clamp(max=threshold).detach()


def truncated_sequence_importance(samples: Samples, old_R: Tensor, behaviour_R: Tensor, threshold: float) -> Tensor:
    """[R] the same for whole transitions: min(Π exp(old − behaviour), threshold), the product over unmasked tokens.

    This is the exact correction for a response as one action. The correction for single tokens is biased: it leaves out
    the probability of the tokens before. The variance of this one grows with the response's length.
    """
    transitions = samples.values_N.numel()
    log_ratio_R = log_ratio(old_R, behaviour_R).masked_fill(~samples.mask_R, 0.0)
    sum_N = segment_sum(log_ratio_R, samples.transition_R, transitions).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return sum_N.exp().clamp(max=threshold).detach()[samples.transition_R]
