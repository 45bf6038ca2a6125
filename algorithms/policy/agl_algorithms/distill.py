"""On-policy distillation: the policy's own replies, each of their tokens scored by a teacher.

Generalized knowledge distillation (arXiv 2306.13649) with the student's samples alone and the reverse KL. With the
teacher's distribution π_T at the sampling temperature, and GRPO's advantage A_grpo of the credited return:

    A    = (log π_T − log π_old)  +  reward_weight · A_grpo
    loss = the clipped surrogate over A (`agl_algorithms.policy_gradient`)

Without a reward, the expected gradient at π = π_old is that of the mean over tokens of KL(π ‖ π_T), each token's with
the tokens before it as they were sampled: a token is not charged for what comes after it (discount 0).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import DistillOptions, GrpoOptions
from agl_algorithms.policy_gradient import Logprobs, PolicyGradient, Samples, Teacher, kl_k3, log_ratio


class Distill(PolicyGradient):
    """On-policy distillation with its options; see the module for the formulas."""

    options: DistillOptions
    needs_scores = True

    def __init__(self, options: DistillOptions) -> None:
        super().__init__(options)
        self.teacher = Teacher(options.teacher, options.teacher_model, options.teacher_key_env)

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] the reward's part; `rescore` adds the teacher's."""
        if not self.options.reward_weight:
            return torch.zeros_like(samples.behaviour_R)
        return self.options.reward_weight * Grpo(GrpoOptions()).advantages(samples)

    def rescore(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[R] the advantages A, 0 at masked tokens.

        Log-ratios are clamped to ±20. Metric: kl_teacher (k3 of KL(old ‖ teacher), the mean by weight).
        """
        assert logprobs.teacher_R is not None, "an algorithm with a teacher gets it"
        kl_R = kl_k3(logprobs.old_R, logprobs.teacher_R)
        advantages_R = advantages_R + log_ratio(logprobs.teacher_R, logprobs.old_R) * samples.mask_R
        return advantages_R, {"kl_teacher": (weights_R * kl_R).sum() / weights_R.sum()}
