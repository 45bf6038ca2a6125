"""Token weights of a loss: each token's share. The weights of each rule sum to 1.

They do not include corrections (`Batch.weight_N`, for instance of replayed experience).
`agl_algorithms.prepared.Prepared` multiplies these in afterwards, so that the share that a correction takes from one
transition goes to no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agl_algorithms.interface import Samples
from agl_algorithms.options import Aggregation
from agl_algorithms.statistics import count_rollouts, dense, segment_count, segment_sum


def token_weights(samples: Samples, aggregation: Aggregation, taking_part_N: Tensor | None = None) -> Tensor:
    """[R] weights of the response tokens; 0 where masked or where `taking_part_N` [N] bool is False.

    With a_t the response of transition t, |a_t| its unmasked tokens, T_i the transitions of rollout i that have
    some, G_g the rollouts of group g that have some:

    - "rollout": 1 / (groups · G_g · T_i · |a_t|), so that groups, rollouts and transitions each share equally;
    - "sequence-mean": 1 / (transitions · |a_t|);
    - "token-mean": 1 / (all unmasked tokens of the batch).

    If a rollout is one transition, "rollout" is GRPO's objective (arXiv 2402.03300, equation 3): the mean over
    questions of the mean over each question's answers. "sequence-mean" is the same if all groups have one size. DAPO
    (arXiv 2503.14476, equation 8) divides by the tokens of each question's answers and takes the mean over questions;
    "token-mean" divides by the tokens of the whole batch, as veRL and TRL do, so a group of long answers weighs more.
    """
    transitions = samples.values_N.numel()
    mask_R = samples.mask_R
    if taking_part_N is not None:
        mask_R = mask_R & taking_part_N[samples.transition_R]
    mask_R = mask_R.to(torch.float64)
    tokens_N = segment_sum(mask_R, samples.transition_R, transitions)
    trained_N = tokens_N > 0
    if aggregation == "token-mean":
        per_token_N = (1.0 / tokens_N.sum().clamp(min=1)).expand(transitions)
    elif aggregation == "sequence-mean":
        per_token_N = 1.0 / (trained_N.sum().clamp(min=1) * tokens_N.clamp(min=1))
    else:
        rollouts_N, groups = count_rollouts(samples, trained_N)
        rollout_N, rollouts = dense(samples.rollout_N)
        turns_N = segment_count(rollout_N[trained_N], rollouts)[rollout_N]
        per_token_N = 1.0 / (groups * rollouts_N * turns_N * tokens_N).clamp(min=1)
    return (per_token_N[samples.transition_R] * mask_R).to(samples.behaviour_R.dtype)
