"""What must hold for GRPO on every batch: its invariances, and that every option does something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agl_algorithms.grpo import Grpo
from agl_algorithms.options import GrpoOptions

from .conftest import Row, batches, build

EVERY_KIND = [
    GrpoOptions(),
    GrpoOptions(beta=0, std_normalization=False, aggregation="token-mean"),
    GrpoOptions(clip_high=0.28, drop_equal_groups=True, aggregation="sequence-mean"),
    GrpoOptions(ratio="sequence", clip=0.1, clip_high=0.2, importance_cap=1.1),
]


@pytest.mark.parametrize(
    "settings_without_effect",
    [
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
