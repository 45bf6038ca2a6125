"""What must hold for GRPO on every batch: its invariances, and that every option does something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.interface import Logprobs, Samples
from agl_algorithms.options import GrpoOptions

from .conftest import Row, batches, build, make_logprobs

EVERY_KIND = [
    GrpoOptions(),
    GrpoOptions(beta=0, std_normalization=False, aggregation="token-mean"),
    GrpoOptions(clip_high=0.28, drop_equal_groups=True, aggregation="sequence-mean"),
    GrpoOptions(ratio="sequence", sequence_clip=0.1, sequence_clip_high=0.2, importance_cap=1.1),
]


def whole_loss(options: GrpoOptions, samples: Samples, logprobs: Logprobs) -> Tensor:
    grpo = Grpo(options)
    return grpo.loss(samples, logprobs, grpo.advantages(samples), grpo.weights(samples))[0]


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
        ({}, {"importance_cap": 1.05}),
        ({"importance_cap": 1.05}, {"importance_level": "sequence"}),
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
        {"importance_level": "sequence"},
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


@given(batches(), st.sampled_from(EVERY_KIND), st.floats(-10, 10))
def test_a_constant_reward_for_a_group_changes_nothing(
    batch: tuple[list[Row], int], options: GrpoOptions, constant: float
) -> None:
    rows, seed = batch
    moved = [dataclasses.replace(row, value=row.value + constant) if row.group == 0 else row for row in rows]
    before, after = (Grpo(options).advantages(build(each, seed)[0]) for each in (rows, moved))
    # A shift rounds the values; where a group is equal the shift keeps it so, elsewhere σ is at least 0.1.
    torch.testing.assert_close(before, after, rtol=1e-8, atol=1e-8)
