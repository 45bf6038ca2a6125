"""REINFORCE++ against numbers worked by hand, and its invariances. tests/oracles compares it with veRL."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agl_algorithms.plugin import ReinforceOptions
from agl_algorithms.policy_gradient import Samples
from agl_algorithms.reinforce import Reinforce

from .conftest import Row, make_samples


def advantages(samples: Samples, **options: Any) -> Tensor:
    return Reinforce(ReinforceOptions(**options)).advantages(samples)


def test_hand_worked_example() -> None:
    # Returns 1, 1 and 0 over tokens (the masked one does not count): mean 2/3, unbiased variance 1/3.
    samples = make_samples([Row(0, 0, 1.0, (True, False, True)), Row(1, 1, 0.0, (True,))])
    reinforce = Reinforce(ReinforceOptions())
    third = math.sqrt(1 / 3)
    assert reinforce.advantages(samples).tolist() == pytest.approx([third, 0.0, third, -2 * third], abs=1e-7)
    assert reinforce.weights(samples).tolist() == [0.25, 0.0, 0.25, 0.5]


def test_choices_of_a_call_stand_side_by_side() -> None:
    # Call 0 has the choices worth 1 and 3, call 1 the choices worth 10 and 20: after call 0 comes their mean, 15.
    samples = make_samples([Row(0, 0, value, (True,)) for value in (1.0, 3.0, 10.0, 20.0)])
    samples = dataclasses.replace(samples, turn_N=torch.tensor([0, 0, 1, 1]))
    returns = torch.tensor([16.0, 18.0, 10.0, 20.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(advantages(samples, across_calls=True), expected, rtol=1e-6, atol=1e-6)


def test_equal_returns_have_exactly_zero_advantage_and_are_not_computed() -> None:
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.6 - 0.3, 0.1 + 0.1 + 0.1]  # They differ by rounding alone.
    samples = make_samples([Row(0, i, reward, (True, i % 2 == 0)) for i, reward in enumerate(rewards)])
    for options in (ReinforceOptions(), ReinforceOptions(whitening="transitions")):
        reinforce = Reinforce(options)
        assert (reinforce.advantages(samples) == 0).all()
        assert not reinforce.keep(samples, reinforce.advantages(samples)).any()
    with_kl = Reinforce(ReinforceOptions(beta=0.1))
    assert with_kl.keep(samples, with_kl.advantages(samples)).all()
