"""What must hold for GRPO on every batch: gradients, invariances, and that every option does something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import GrpoOptions

from .conftest import Row, make_logprobs, make_samples

EVERY_KIND = [
    GrpoOptions(),
    GrpoOptions(beta=0, std_normalization=False, aggregation="token-mean"),
    GrpoOptions(clip_high=0.28, drop_equal_groups=True, aggregation="sequence-mean"),
    GrpoOptions(ratio="sequence", sequence_clip=0.1, sequence_clip_high=0.2, importance_threshold=1.1),
]


def whole_loss(options: GrpoOptions, samples: Samples, logprobs: Logprobs) -> Tensor:
    grpo = Grpo(options)
    return grpo.loss(samples, logprobs, grpo.advantages(samples), grpo.weights(samples))[0]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], int]:
    rows: list[Row] = []
    rollout = 0
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            value = draw(st.sampled_from([0.0, 0.25, 1.0, -2.0]))
            for _ in range(draw(st.integers(1, 3))):
                credit = value + draw(st.sampled_from([0.0, 0.0, 0.5]))
                mask = draw(st.lists(st.booleans(), min_size=1, max_size=4))
                rows.append(Row(group, rollout, credit, tuple(mask)))
            rollout += 1
    return rows, draw(st.integers(0, 1000))


def build(rows: list[Row], seed: int) -> tuple[Samples, Logprobs]:
    logprobs = make_logprobs(sum(len(row.mask) for row in rows), seed)
    return make_samples(rows, logprobs.behaviour_R), logprobs


def select(samples: Samples, logprobs: Logprobs, order: list[int]) -> tuple[Samples, Logprobs, Tensor]:
    """The transitions of `order`, renumbered, and which response tokens they are."""
    tokens = torch.cat([(samples.transition_R == i).nonzero()[:, 0] for i in order])
    lengths = torch.tensor([int((samples.transition_R == i).sum()) for i in order])
    picked = Samples(
        transition_R=torch.repeat_interleave(torch.arange(len(order)), lengths),
        mask_R=samples.mask_R[tokens],
        behaviour_R=samples.behaviour_R[tokens],
        values_N=samples.values_N[order],
        scores_N=samples.scores_N[order],
        group_N=samples.group_N[order],
        rollout_N=samples.rollout_N[order],
        turn_N=samples.turn_N[order],
    )
    assert logprobs.reference_R is not None
    compared = Logprobs(
        logprobs.current_R[tokens],
        logprobs.old_R[tokens],
        logprobs.behaviour_R[tokens],
        logprobs.reference_R[tokens],
    )
    return picked, compared, tokens


@pytest.mark.parametrize("options", EVERY_KIND, ids=range(len(EVERY_KIND)))
def test_gradient_equals_finite_differences(ragged: Samples, options: GrpoOptions) -> None:
    logprobs = make_logprobs(ragged.mask_R.numel(), seed=3)
    (gradient,) = torch.autograd.grad(whole_loss(options, ragged, logprobs), logprobs.current_R)
    step = 1e-6
    for i in range(ragged.mask_R.numel()):
        nudge = torch.zeros_like(logprobs.current_R)
        nudge[i] = step
        up, down = (
            whole_loss(options, ragged, dataclasses.replace(logprobs, current_R=logprobs.current_R.detach() + d))
            for d in (nudge, -nudge)
        )
        assert gradient[i].item() == pytest.approx((up - down).item() / (2 * step), abs=1e-8)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"clip": 0.1}),
        ({}, {"clip_high": 0.4}),
        ({}, {"beta": 0.0}),
        ({}, {"std_normalization": False}),
        ({}, {"epsilon": 0.5}),
        ({}, {"ratio": "sequence"}),
        ({"ratio": "sequence"}, {"sequence_clip": 0.2}),
        ({"ratio": "sequence"}, {"sequence_clip_high": 0.2}),
        ({}, {"aggregation": "token-mean"}),
        ({}, {"aggregation": "sequence-mean"}),
        ({}, {"drop_equal_groups": True}),
        ({}, {"importance_threshold": 1.05}),
    ],
    ids=str,
)
def test_every_loss_option_changes_the_gradient(ragged: Samples, base: dict[str, Any], change: dict[str, Any]) -> None:
    logprobs = make_logprobs(ragged.mask_R.numel(), seed=3)

    def gradient(options: dict[str, Any]) -> Tensor:
        return torch.autograd.grad(whole_loss(GrpoOptions(**options), ragged, logprobs), logprobs.current_R)[0]

    assert not torch.allclose(gradient(base), gradient(base | change), rtol=1e-3, atol=1e-6)


def test_epochs_and_minibatches_reach_the_engine() -> None:
    grpo = Grpo(GrpoOptions(epochs=3, minibatches=5))
    assert (grpo.epochs, grpo.minibatches) == (3, 5)


@pytest.mark.parametrize(
    "settings_without_effect",
    [
        {"ratio": "sequence", "clip": 0.1},
        {"ratio": "sequence", "clip_high": 0.1},
        {"sequence_clip": 0.1},
        {"std_normalization": False, "epsilon": 0.1},
    ],
)
def test_settings_without_effect_are_refused(settings_without_effect: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="has no effect"):
        GrpoOptions(**settings_without_effect)


@pytest.mark.parametrize("bad", [{"clip": 0}, {"beta": -1}, {"epochs": 0}, {"epsilon": 0}, {"klip": 1}])
def test_settings_out_of_bounds_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GrpoOptions(**bad)


def test_options_survive_being_sent() -> None:
    for options in EVERY_KIND:
        assert GrpoOptions(**options.model_dump()) == options


@given(batches(), st.sampled_from(EVERY_KIND))
@settings(max_examples=60, deadline=None)
def test_weights_sum_to_one_and_no_token_is_masked_and_weighs(
    batch: tuple[list[Row], int], options: GrpoOptions
) -> None:
    samples, _ = build(*batch)
    weights = Grpo(options).weights(samples)
    total = weights.sum().item()
    assert total == pytest.approx(1.0) or total == 0.0
    assert (weights[~samples.mask_R] == 0).all()


@given(batches(), st.sampled_from(EVERY_KIND), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_of_transitions_does_not_matter(batch: tuple[list[Row], int], options: GrpoOptions, rng: Any) -> None:
    samples, logprobs = build(*batch)
    order = list(range(samples.values_N.numel()))
    rng.shuffle(order)
    shuffled, compared, tokens = select(samples, logprobs, order)
    grpo = Grpo(options)
    torch.testing.assert_close(grpo.advantages(shuffled), grpo.advantages(samples)[tokens], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole_loss(options, shuffled, compared), whole_loss(options, samples, logprobs))


@given(batches(), st.sampled_from(EVERY_KIND), st.floats(-10, 10))
@settings(max_examples=60, deadline=None)
def test_a_constant_reward_for_a_group_changes_nothing(
    batch: tuple[list[Row], int], options: GrpoOptions, constant: float
) -> None:
    rows, seed = batch
    moved = [dataclasses.replace(row, value=row.value + constant) if row.group == 0 else row for row in rows]
    before, after = (Grpo(options).advantages(build(each, seed)[0]) for each in (rows, moved))
    # A shift rounds the values; where a group is equal the shift keeps it so, elsewhere σ is at least 0.1.
    torch.testing.assert_close(before, after, rtol=1e-8, atol=1e-8)


@given(batches(), st.sampled_from(EVERY_KIND), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_micro_batches_add_up_to_the_whole(batch: tuple[list[Row], int], options: GrpoOptions, size: int) -> None:
    samples, logprobs = build(*batch)
    grpo = Grpo(options)
    advantages, weights = grpo.advantages(samples), grpo.weights(samples)
    whole, metrics = grpo.loss(samples, logprobs, advantages, weights)
    count = samples.values_N.numel()
    parts = []
    for start in range(0, count, size):
        picked, compared, tokens = select(samples, logprobs, list(range(start, min(start + size, count))))
        parts.append(grpo.loss(picked, compared, advantages[tokens], weights[tokens]))
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for name, value in metrics.items():
        combine = max if name.endswith("_max") else sum
        torch.testing.assert_close(combine(part[1][name] for part in parts), value)
