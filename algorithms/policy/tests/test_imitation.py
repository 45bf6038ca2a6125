"""SFT, RFT, DPO and distillation: which rollouts are chosen or paired, and exact losses and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from agl_algorithms.distill import Distill
from agl_algorithms.dpo import Dpo, preference_pairs
from agl_algorithms.grpo import Grpo
from agl_algorithms.imitation import Rft, Sft
from agl_algorithms.plugin import DistillOptions, DpoOptions, GrpoOptions, RftOptions, SftOptions
from agl_algorithms.policy_gradient import Logprobs, Samples

from .conftest import Row, batches, build, make_logprobs, make_samples, select

GROUP = [
    Row(0, 0, 0.75, (True, True)),
    Row(0, 0, 0.25, (True,)),
    Row(0, 1, 0.0, (True,)),
    Row(0, 2, 0.5, (True, False)),
    Row(1, 3, 0.1 + 0.2, (True,)),
]
"""The first rollout has the mean 0.5, as the third one; that of the second group is 0.3 but for rounding."""


def imitated(**options: Any) -> list[float]:
    """The factor of each transition's likelihood."""
    samples = make_samples(GROUP)
    rft = Rft(RftOptions(**options))
    first = [int((samples.transition_R == i).nonzero()[0, 0]) for i in range(len(GROUP))]
    return [round(value, 9) for value in rft.advantages(samples)[first].tolist()]


def test_a_threshold_takes_rollouts_with_at_least_that_return() -> None:
    assert imitated(threshold=0.5) == [1, 1, 0, 1, 0]
    assert imitated(threshold=0.3) == [1, 1, 0, 1, 1]
    assert imitated(threshold=-1.0) == [1] * 5
    assert imitated(threshold=0.6) == [0] * 5


def test_the_best_of_each_group_and_of_equal_ones_the_first() -> None:
    assert imitated(top_k=1) == [1, 1, 0, 0, 1]
    assert imitated(top_k=2) == [1, 1, 0, 1, 1]
    assert imitated(top_k=9) == [1] * 5


@given(
    batches(),
    st.sampled_from([{"threshold": 0.25}, {"top_k": 1}, {"top_k": 2}]),
    st.sampled_from(["rollout", "token-mean", "sequence-mean"]),
)
def test_rft_is_sft_on_the_chosen_subset(batch: tuple[list[Row], int], chosen: Any, aggregation: Any) -> None:
    samples, logprobs = build(*batch)
    rft, sft = Rft(RftOptions(aggregation=aggregation, **chosen)), Sft(SftOptions(aggregation=aggregation))
    factor_N = samples.sums(rft.advantages(samples))
    subset = [i for i in range(len(samples)) if factor_N[i] > 0]

    def loss(algorithm: Any, samples: Samples, logprobs: Logprobs) -> Tensor:
        return algorithm.loss(samples, logprobs, algorithm.advantages(samples), algorithm.weights(samples))[0]

    if not subset:
        assert loss(rft, samples, logprobs) == 0
        return
    part, compared, tokens = select(samples, logprobs, subset)
    torch.testing.assert_close(loss(rft, samples, logprobs), loss(sft, part, compared))
    torch.testing.assert_close(rft.weights(samples)[tokens], sft.weights(part))
    assert rft.keep(samples, rft.advantages(samples)).nonzero()[:, 0].tolist() == subset


def test_a_pair_is_the_best_and_the_worst_of_a_group_by_more_than_rounding() -> None:
    values = {0: [1.0, 0.5, 0.5, 0.0], 1: [0.1, 0.9], 2: [0.3, 0.1 + 0.2]}
    rows = [(group, value) for group, of_group in values.items() for value in of_group]
    samples = make_samples([Row(group, i, value, (True,)) for i, (group, value) in enumerate(rows)])
    better, worse = preference_pairs(samples)
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 3), (5, 4)]


def test_only_rollouts_in_pairs_are_computed_and_a_masked_one_is_in_none() -> None:
    values = [(0, 1.0, True), (0, 0.5, True), (0, 0.0, True), (0, -1.0, False), (1, 2.0, True), (1, 2.0, True)]
    samples = make_samples([Row(group, i, value, (shown,)) for i, (group, value, shown) in enumerate(values)])
    algorithm = Dpo(DpoOptions())
    assert algorithm.weights(samples).tolist() == [1, 0, 1, 0, 0, 0]
    assert algorithm.keep(samples, algorithm.advantages(samples)).tolist() == [True, False, True, False, False, False]


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
