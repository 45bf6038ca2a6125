"""PPO against numbers worked by hand: advantages, targets, the value loss. tests/oracles compares it with veRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agl_algorithms.plugin import PpoOptions
from agl_algorithms.ppo import Ppo, explained_variance

from .conftest import Row, make_samples


def ppo(**options: Any) -> Ppo:
    return Ppo(PpoOptions(**options))


def test_hand_worked_example_inside_a_response() -> None:
    # γ = 0.5, λ = 0.5, values 1, 2, 4 of the unmasked tokens, return 10 at the last one:
    # δ = 0.5·2−1, 0.5·4−2, 10−4 = 0, 0, 6; A = 0 + 0.25·1.5, 0 + 0.25·6, 6.
    samples = make_samples([Row(0, 0, 10.0, (True, True, False, True))])
    values = torch.tensor([1.0, 2.0, 99.0, 4.0], dtype=torch.float64)
    algorithm = ppo(gamma=0.5, lam=0.5, whitening="off")
    assert algorithm.advantages(samples, values).tolist() == pytest.approx([0.375, 1.5, 0.0, 6.0])
    targets = algorithm.value_targets(samples, values)
    assert targets[samples.mask_R].tolist() == pytest.approx([1.375, 3.5, 10.0])
    assert torch.equal(algorithm.value_weights(samples), algorithm.weights(samples))


def test_hand_worked_example_across_calls() -> None:
    # Rewards 1 and 10, values 2 and 4 at the ends of the prompts, γ = λ = 0.5:
    # A = 10−4 = 6 for the second call, 1 + 0.5·4 − 2 + 0.25·6 = 2.5 for the first.
    samples = make_samples([Row(0, 0, 1.0, (False, True, True)), Row(0, 0, 10.0, (True,))])
    values = torch.tensor([2.0, 77.0, 88.0, 4.0], dtype=torch.float64)
    algorithm = ppo(across_calls=True, gamma=0.5, lam=0.5, whitening="off")
    assert algorithm.advantages(samples, values).tolist() == pytest.approx([0.0, 2.5, 2.5, 6.0])
    weights = algorithm.value_weights(samples)
    assert weights.tolist() == [0.5, 0.0, 0.0, 0.5]
    assert algorithm.value_targets(samples, values)[weights > 0].tolist() == pytest.approx([4.5, 10.0])


def test_the_value_loss_worked_by_hand() -> None:
    # Old 0, target 1. A step to 0.9 counts as 0.2 (worse, so it is what counts); 0.1 is inside the clip range;
    # −0.5 counts as itself, for it is worse than −0.2.
    current = torch.tensor([0.9, 0.1, -0.5], dtype=torch.float64)
    old, target = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    loss, metrics = ppo().value_loss(current, old, target, weights)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.64 + 0.25 * 0.81 + 0.25 * 2.25))
    assert metrics["value_loss"].item() == pytest.approx(loss.item())
    assert metrics["value_clip_fraction"].item() == pytest.approx(0.5)
    assert metrics["value_mean"].item() == pytest.approx(0.5 * 0.9 + 0.25 * 0.1 - 0.25 * 0.5)
    loss, metrics = ppo(value_clip=None).value_loss(current, old, target, weights)
    assert loss.item() == pytest.approx(0.5 * (0.5 * 0.01 + 0.25 * 0.81 + 0.25 * 2.25))
    assert "value_clip_fraction" not in metrics


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
