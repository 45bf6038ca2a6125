"""On-policy distillation: its expected gradient, its advantages worked by hand, its settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from agl_algorithms.distill import Distill
from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import DistillOptions, GrpoOptions
from agl_algorithms.policy_gradient import Logprobs, Samples

from .conftest import Row, make_logprobs, make_samples


def distill(**options: Any) -> Distill:
    return Distill(DistillOptions(teacher="somewhere", **options))


def rescored(algorithm: Distill, samples: Samples, old_R: Tensor, teacher_R: Tensor) -> tuple[Tensor, Any]:
    logprobs = Logprobs(old_R, old_R, old_R, teacher_R=teacher_R)
    return algorithm.rescore(samples, logprobs, algorithm.advantages(samples), algorithm.weights(samples))


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Summed over all pairs of tokens by their probability; the oracle is torch's KL of each token's distribution."""
    generator = torch.Generator().manual_seed(3)
    first, second, of_teacher = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4,), (4, 4), (5, 4))
    )
    first.requires_grad_()
    second.requires_grad_()
    algorithm, teacher = distill(), log_softmax(of_teacher, -1)
    samples = make_samples([Row(0, 0, 0.0, (True, True))])

    expected = torch.zeros((), dtype=torch.float64)
    sampled = torch.zeros((), dtype=torch.float64)
    for a in range(4):
        of_first, of_second = log_softmax(first, -1), log_softmax(second[a], -1)
        for b in range(4):
            current_R = torch.stack([of_first[a], of_second[b]])
            old_R = current_R.detach()
            advantages_R, _ = rescored(algorithm, samples, old_R, torch.stack([teacher[0, a], teacher[1 + a, b]]))
            loss, _ = algorithm.loss(
                samples, Logprobs(current_R, old_R, old_R), advantages_R, algorithm.weights(samples)
            )
            sampled = sampled + old_R.sum().exp() * loss
        kl = kl_div(teacher[1 + a], of_second, reduction="sum", log_target=True)
        expected = expected + 0.5 * of_first[a].detach().exp() * kl
    expected = expected + 0.5 * kl_div(teacher[0], log_softmax(first, -1), reduction="sum", log_target=True)
    own = torch.autograd.grad(sampled, [first, second], retain_graph=True)
    torch.testing.assert_close(own, torch.autograd.grad(expected, [first, second]))


def test_the_rewards_part_is_grpos_and_log_ratios_are_bounded(ragged: Samples) -> None:
    old_R = make_logprobs(ragged.mask_R.numel(), seed=1).old_R
    teacher_R = old_R + 0.5
    teacher_R[0], teacher_R[1] = -math.inf, old_R[1] + 50
    advantages_R, measured = rescored(distill(reward_weight=2), ragged, old_R, teacher_R)
    of_teacher = torch.full_like(old_R, 0.5)
    of_teacher[0], of_teacher[1] = -20, 20
    expected = 2 * Grpo(GrpoOptions()).advantages(ragged) + of_teacher * ragged.mask_R
    torch.testing.assert_close(advantages_R, expected)
    assert measured["kl_teacher"] > 0
    alone, measured = rescored(distill(), ragged, old_R, old_R + 0.5)
    torch.testing.assert_close(alone, 0.5 * ragged.mask_R.double())
    assert measured["kl_teacher"].item() == pytest.approx(math.expm1(0.5) - 0.5)


def test_without_rewards_every_transition_is_kept(ragged: Samples) -> None:
    kept = distill().keep(ragged, torch.zeros_like(ragged.behaviour_R))
    assert kept.tolist() == (ragged.sums(ragged.mask_R) > 0).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"teacher": ""},
        {"teacher": "a/folder", "teacher_model": "name"},
        {"teacher": "a/folder", "teacher_key_env": "KEY"},
        {"teacher": "http://localhost:8000/v1"},
        {"teacher": "a/folder", "reward_weight": -1},
    ],
)
def test_settings_without_effect_and_missing_ones_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DistillOptions(**settings)
