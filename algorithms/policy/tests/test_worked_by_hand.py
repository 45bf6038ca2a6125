"""The algorithms against numbers worked by hand; GRPO's KL metrics. tests/oracles compares them with veRL and TRL."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions, PpoOptions, ReinforceOptions
from agl_algorithms.policy_gradient import Logprobs
from agl_algorithms.ppo import Ppo, explained_variance, gae_across_calls
from agl_algorithms.reinforce import Reinforce
from agl_core.types.episodes import Moment

from .conftest import Row, make_samples


def test_grpo_worked_by_hand() -> None:
    # One group, two rollouts with rewards 1 and 0: mean 0.5, unbiased deviation sqrt(0.5), advantages about ±0.7071.
    samples = make_samples([Row(0, 0, 1.0, (True, True)), Row(0, 1, 0.0, (True,))])
    grpo = Grpo(GrpoOptions(beta=0.5, entropy=0.25))
    advantages = grpo.advantages(samples)
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([half, half, -half], dtype=torch.float64))
    weights = grpo.weights(samples)
    assert weights.tolist() == [0.25, 0.25, 0.5]

    # Ratios 1.5 (clipped to 1.2 as A > 0), 0.9 and 0.5 (clipped to 0.8 as A < 0).
    zeros = torch.zeros(3, dtype=torch.float64)
    current = torch.tensor([1.5, 0.9, 0.5], dtype=torch.float64).log()
    entropies = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)
    loss, metrics = grpo.loss(samples, Logprobs(current, zeros, zeros, zeros, entropies), advantages, weights)
    policy = -(0.25 * 1.2 * half + 0.25 * 0.9 * half + 0.5 * 0.8 * -half)
    # k3 with log-ratio d = reference - current: exp(d) - d - 1.
    kl = [1 / r + math.log(r) - 1 for r in (1.5, 0.9, 0.5)]
    kl_mean = 0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2]
    bonus = 0.25 * (0.25 * 0.1 + 0.25 * 0.3 + 0.5 * 0.7)
    assert loss.item() == pytest.approx(policy + 0.5 * kl_mean - bonus, abs=1e-12)
    assert metrics["policy_loss"].item() == pytest.approx(policy, abs=1e-12)
    assert metrics["kl_reference"].item() == pytest.approx(kl_mean, abs=1e-12)
    assert metrics["clip_fraction"].item() == pytest.approx(0.75)
    assert metrics["ratio_mean"].item() == pytest.approx(0.25 * 1.5 + 0.25 * 0.9 + 0.5 * 0.5)
    assert metrics["ratio_max"].item() == pytest.approx(1.5)


def test_cispo_and_the_importance_mask_worked_by_hand() -> None:
    """Each token's gradient is its bounded ratio; one whose importance is out of bounds has none."""
    samples = make_samples([Row(0, 0, 1.0, (True, True, True, True))])
    grpo = Grpo(GrpoOptions(surrogate="cispo", clip=0.2, clip_high=0.3, importance_cap=2, importance_floor=0.5))
    # Ratios 1.5 (bounded to 1.3), 0.9, 0.5 (to 0.8) and 1; importance 1, 2, 1.6 and 0.4, which is below the floor.
    old = torch.tensor([0.5, 0.5, 0.4, 0.5], dtype=torch.float64).log()
    current = (old + torch.tensor([1.5, 0.9, 0.5, 1.0], dtype=torch.float64).log()).requires_grad_()
    behaviour = old - torch.tensor([1.0, 2.0 - 1e-9, 1.6, 0.4], dtype=torch.float64).log()
    advantages = torch.tensor([2.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    loss, metrics = grpo.loss(samples, Logprobs(current, old, behaviour), advantages, grpo.weights(samples))
    gradient = torch.autograd.grad(loss, current)[0] * 4
    assert gradient.tolist() == pytest.approx([-1.3 * 2, -0.9 * 2, 0.8 * 1.6, 0.0])
    expected = -(1.3 * 2 * math.log(0.75) + 0.9 * 2 * math.log(0.45) - 0.8 * 1.6 * math.log(0.2)) / 4
    assert loss.item() == pytest.approx(expected)
    assert metrics["clip_fraction"].item() == 0.5
    assert metrics["importance_mean"].item() == pytest.approx((1 + 2 + 1.6 + 0) / 4)


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
    near = make_samples([Row(0, i, scale * reward, (True,)) for i, reward in enumerate((0.3, 0.300001))])
    assert (grpo.advantages(near) != 0).all(), "a small difference is one"
    zeros = make_samples([Row(0, i, reward, (True,)) for i, reward in enumerate((0.1 + 0.2 - 0.3, 0.0))])
    assert (grpo.advantages(zeros) == 0).all(), "parts that cancel are nothing"


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


def test_the_value_loss_worked_by_hand() -> None:
    # Old 0, target 1. A step to 0.9 counts as 0.2 (worse, so it is what counts); 0.1 is inside the clip range;
    # −0.5 counts as itself, for it is worse than −0.2.
    current = torch.tensor([0.9, 0.1, -0.5], dtype=torch.float64)
    old, target = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    loss, metrics = Ppo(PpoOptions()).value_loss(current, old, target, weights)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.64 + 0.25 * 0.81 + 0.25 * 2.25))
    assert metrics["value_loss"].item() == pytest.approx(loss.item())
    assert metrics["value_clip_fraction"].item() == pytest.approx(0.5)
    assert metrics["value_mean"].item() == pytest.approx(0.5 * 0.9 + 0.25 * 0.1 - 0.25 * 0.5)


def test_explained_variance_worked_by_hand() -> None:
    target = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    weights = torch.tensor([0.3, 0.3, 0.0], dtype=torch.float64)
    assert explained_variance(target, target, weights) == 1.0
    assert explained_variance(target + 3, target, weights) == pytest.approx(1.0)  # a constant error is no variance
    assert explained_variance(torch.zeros(3), target, weights) == pytest.approx(0.0)
    assert explained_variance(-target, target, weights) == pytest.approx(-3.0)
    assert explained_variance(target / 2, target, weights) == pytest.approx(0.75)
    assert math.isnan(explained_variance(target, torch.ones(3), weights))
    # By weight: mean 0.75, variance 0.1875 of the targets; the errors 0 and 0.5 have variance 0.046875.
    uneven = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    assert explained_variance(target * 0.5, target, uneven) == pytest.approx(1 - 0.046875 / 0.1875)


def test_choices_of_a_call_stand_side_by_side() -> None:
    # Call 0 has the choices worth 1 and 3, call 1 the choices worth 10 and 20: after call 0 comes their mean, 15.
    samples = make_samples([Row(0, 0, value, (True,)) for value in (1.0, 3.0, 10.0, 20.0)])
    samples = dataclasses.replace(samples, turn_N=torch.tensor([0, 0, 1, 1]))
    returns = torch.tensor([16.0, 18.0, 10.0, 20.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std()
    advantages = Reinforce(ReinforceOptions(across_calls=True)).advantages(samples)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_across_calls_of_threads_with_what_others_earn() -> None:
    # A rollout's trained calls: turn 0, and turn 1 of a sub-agent that it started. The call of turn 2 is another's.
    samples = make_samples([Row(0, 0, 7.0, (True,)), Row(0, 1, 0.5, (True,)), Row(0, 1, 1.0, (True,))])
    below = ((0, 1),)
    calls = [[Moment(0, (), 7.0)], [Moment(0, (), 0.5), Moment(1, below, 1.0), Moment(2, (), 2.0)]]
    advantages = gae_across_calls(
        dataclasses.replace(samples, calls=calls), torch.tensor([5.0, 3.0, 4.0]), gamma=0.5, lam=0.5
    )
    # The sub-agent leads to turn 2, a reward of its step: 1 + 2 − 4. So does turn 0, with the sub-agent's own reward,
    # discounted: 0.5 + 2 + 0.5 · 1 − 3.
    assert advantages.tolist() == [2.0, 0.0, -1.0]


@pytest.mark.parametrize("rewards", [(0.3, 0.1 + 0.2, 0.3, 0.6 - 0.3, 0.1 + 0.1 + 0.1), (0.1 + 0.2 - 0.3, 0.0)])
def test_returns_of_reinforce_that_differ_by_rounding_alone_have_no_advantage(rewards: tuple[float, ...]) -> None:
    samples = make_samples([Row(0, i, reward, (True, i % 2 == 0)) for i, reward in enumerate(rewards)])
    for options in (ReinforceOptions(), ReinforceOptions(whitening="transitions")):
        reinforce = Reinforce(options)
        assert (reinforce.advantages(samples) == 0).all()
        assert not reinforce.keep(samples, reinforce.advantages(samples)).any()
    for options in (ReinforceOptions(beta=0.1), ReinforceOptions(entropy=0.1)):
        reinforce = Reinforce(options)
        assert reinforce.keep(samples, reinforce.advantages(samples)).all(), "for the sake of that term"
