"""SFT and RFT: likelihood of what is imitated, and which rollouts that are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agl_algorithms.imitation import Rft, Sft
from agl_algorithms.plugin import RftOptions, SftOptions
from agl_algorithms.policy_gradient import Logprobs, Samples

from .conftest import Row, batches, build, make_samples, select

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


def test_weights_are_what_a_return_is_above_the_mean_of_its_group() -> None:
    third = 1 / 3  # of the rollouts' means 0.5, 0 and 0.5
    assert imitated(weights="advantage") == pytest.approx([0.75 - third, 0, 0, 0.5 - third, 0])


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "does not say which rollouts are good"), ({"threshold": 0.0, "top_k": 1}, "has both threshold and top_k")],
)
def test_exactly_one_choice_is_made(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RftOptions(**given)


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
