"""GRPO: numbers worked by hand, its invariances, and its KL metrics. tests/oracles compares it with veRL and TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_algorithms.policy_gradient import Logprobs

from .conftest import Row, make_samples


def test_hand_worked_example() -> None:
    # One group, two rollouts with rewards 1 and 0: mean 0.5, unbiased deviation sqrt(0.5), advantages ±0.7071.
    samples = make_samples([Row(0, 0, 1.0, (True, True)), Row(0, 1, 0.0, (True,))])
    grpo = Grpo(GrpoOptions(beta=0.5, epsilon=1e-12))
    advantages = grpo.advantages(samples)
    half = math.sqrt(0.5)
    torch.testing.assert_close(advantages, torch.tensor([half, half, -half], dtype=torch.float64))
    weights = grpo.weights(samples)
    assert weights.tolist() == [0.25, 0.25, 0.5]

    # Ratios 1.5 (clipped to 1.2 as A > 0), 0.9 and 0.5 (clipped to 0.8 as A < 0).
    zeros = torch.zeros(3, dtype=torch.float64)
    current = torch.tensor([1.5, 0.9, 0.5], dtype=torch.float64).log()
    loss, metrics = grpo.loss(samples, Logprobs(current, zeros, zeros, zeros), advantages, weights)
    policy = -(0.25 * 1.2 * half + 0.25 * 0.9 * half + 0.5 * 0.8 * -half)
    # k3 with log-ratio d = reference - current: exp(d) - d - 1.
    kl = [1 / r + math.log(r) - 1 for r in (1.5, 0.9, 0.5)]
    kl_mean = 0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2]
    assert loss.item() == pytest.approx(policy + 0.5 * kl_mean, abs=1e-12)
    assert metrics["policy_loss"].item() == pytest.approx(policy, abs=1e-12)
    assert metrics["kl_reference"].item() == pytest.approx(kl_mean, abs=1e-12)
    assert metrics["clip_fraction"].item() == pytest.approx(0.75)
    assert metrics["ratio_mean"].item() == pytest.approx(0.25 * 1.5 + 0.25 * 0.9 + 0.5 * 0.5)
    assert metrics["ratio_max"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("scale", [1.0, -1.0, 1e6, 1e-6])
def test_equal_groups_have_exactly_zero_advantage(scale: float) -> None:
    """Also where the last bits differ, since the parts of a reward were added in another order."""
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.6 - 0.3, 0.1 + 0.1 + 0.1]
    assert len(set(rewards)) > 1
    rows = [Row(0, i, scale * reward, (True,)) for i, reward in zip((0, 0, 0, 1, 2), rewards, strict=True)]
    samples = make_samples(rows)
    grpo = Grpo(GrpoOptions(beta=0))
    advantages = grpo.advantages(samples)
    assert (advantages == 0).all()
    assert not grpo.keep(samples, advantages).any()
    assert not Grpo(GrpoOptions(drop_equal_groups=True)).weights(samples).any()
    near = make_samples([Row(0, i, scale * reward, (True,)) for i, reward in enumerate((0.3, 0.300001))])
    assert (Grpo(GrpoOptions(epsilon=1e-12)).advantages(near) != 0).all(), "a small difference is one"


def test_sequence_ratio_is_one_number_per_transition() -> None:
    samples = make_samples([Row(0, 0, 1.0, (True, True, False)), Row(0, 1, 0.0, (True,))])
    current = torch.tensor([0.1, 0.3, 9.0, -0.2], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.float64)
    grpo = Grpo(GrpoOptions(ratio="sequence", clip=0.5, clip_high=0.5, beta=0))
    advantages = grpo.advantages(samples)
    loss, _ = grpo.loss(samples, Logprobs(current, zeros, zeros), advantages, grpo.weights(samples))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = -0.5 * math.exp(0.2) * half + 0.5 * math.exp(-0.2) * half
    assert loss.item() == pytest.approx(expected, abs=1e-12)


VOCABULARY = 7
logits = st.lists(st.floats(-3, 3), min_size=VOCABULARY, max_size=VOCABULARY).map(
    lambda values: torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)
)


def metrics(current: Tensor, behaviour: Tensor, reference: Tensor, drawn_from: Tensor) -> dict[str, Any]:
    """Each token of the vocabulary once, weighing as often as `drawn_from` samples it."""
    samples = make_samples([Row(0, token, 0.0, (True,)) for token in range(VOCABULARY)], behaviour)
    logprobs = Logprobs(current, current, behaviour, reference)
    nothing = torch.zeros_like(current)
    return dict(Grpo(GrpoOptions(beta=0.1)).loss(samples, logprobs, nothing, drawn_from.exp())[1])


def exactly(first: Tensor, second: Tensor) -> float:
    return kl_divergence(Categorical(logits=first), Categorical(logits=second)).item()


@given(logits, logits, logits)
def test_the_means_over_what_was_sampled_are_the_kls(current: Tensor, behaviour: Tensor, reference: Tensor) -> None:
    off_policy = metrics(current, behaviour, reference, drawn_from=behaviour)
    assert off_policy["kl_behaviour"].item() == pytest.approx(exactly(behaviour, current), abs=1e-9)
    on_policy = metrics(current, current, reference, drawn_from=current)
    assert on_policy["kl_reference"].item() == pytest.approx(exactly(current, reference), abs=1e-9)


def test_a_token_that_became_unlikely_does_not_make_the_kl_explode() -> None:
    behaviour = torch.log_softmax(torch.tensor([0.0] * VOCABULARY, dtype=torch.float64), -1)
    current = torch.log_softmax(torch.tensor([-12.0] + [0.0] * (VOCABULARY - 1), dtype=torch.float64), -1)
    found = metrics(current, behaviour, behaviour, drawn_from=behaviour)["kl_behaviour"].item()
    assert found == pytest.approx(exactly(behaviour, current))
    assert found < 2
