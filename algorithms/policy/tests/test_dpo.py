"""DPO: which rollouts are pairs, and the exact gradient of its loss. tests/oracles compares it with TRL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agl_algorithms.dpo import Dpo, preference_pairs
from agl_algorithms.plugin import DpoOptions
from agl_algorithms.policy_gradient import Logprobs, Samples

from .conftest import Row, batches, build, make_samples, select


def dpo(**options: Any) -> Dpo:
    return Dpo(DpoOptions(**options))


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        (None, {(0, 3), (5, 4)}),
        (0.0, {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (5, 4)}),
        (0.5, {(0, 3), (5, 4)}),
    ],
)
def test_pairs_are_of_one_group_and_differ_by_more_than_the_margin(
    margin: float | None, expected: set[tuple[int, int]]
) -> None:
    values = {0: [1.0, 0.5, 0.5, 0.0], 1: [0.1, 0.9], 2: [0.3, 0.1 + 0.2]}
    rows = [(group, value) for group, of_group in values.items() for value in of_group]
    samples = make_samples([Row(group, i, value, (True,)) for i, (group, value) in enumerate(rows)])
    better, worse = preference_pairs(samples, margin)
    assert set(zip(better.tolist(), worse.tolist(), strict=True)) == expected
    assert len(better) == len(expected)


def test_only_rollouts_in_pairs_are_computed_and_a_masked_one_is_in_none() -> None:
    values = [(0, 1.0, True), (0, 0.5, True), (0, 0.0, True), (0, -1.0, False), (1, 2.0, True), (1, 2.0, True)]
    samples = make_samples([Row(group, i, value, (shown,)) for i, (group, value, shown) in enumerate(values)])
    algorithm = dpo()
    assert algorithm.weights(samples).tolist() == [1, 0, 1, 0, 0, 0]
    assert algorithm.keep(samples, algorithm.advantages(samples)).tolist() == [True, False, True, False, False, False]


@given(batches(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_neither_the_order_nor_the_split_of_transitions_matters(
    batch: tuple[list[Row], int], rng: Any, size: int
) -> None:
    samples, logprobs = build(*batch)
    algorithm = dpo(margin=0.0)
    order = list(range(len(samples)))
    rng.shuffle(order)

    def advantages_of(samples: Samples, logprobs: Logprobs) -> Tensor:
        return algorithm.rescore(samples, logprobs, algorithm.advantages(samples), algorithm.weights(samples))[0]

    shuffled, compared, tokens = select(samples, logprobs, order)
    advantages_R, weights_R = advantages_of(samples, logprobs), algorithm.weights(samples)
    torch.testing.assert_close(advantages_of(shuffled, compared), advantages_R[tokens])
    whole, _ = algorithm.loss(samples, logprobs, advantages_R, weights_R)
    parts = []
    for start in range(0, len(order), size):
        part, compared, tokens = select(samples, logprobs, order[start : start + size])
        parts.append(algorithm.loss(part, compared, advantages_R[tokens], weights_R[tokens])[0])
    torch.testing.assert_close(sum(parts), whole)
