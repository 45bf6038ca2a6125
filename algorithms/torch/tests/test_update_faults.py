"""What in a batch or a step is broken is left out, counted, and changes nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import subset
from agl_core.protocols import PolicySpec
from agl_core.types import Batch, DropReason
from agl_torch.loading import LoadedModel, load_model

from .conftest import grpo, make_batch, trainer_of, weights_of


def poisoned(batch: Batch, field: str, place: int, value: float) -> Batch:
    array = getattr(batch, field).copy()
    array[place] = value
    return replace(batch, **{field: array})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("behaviour_logprobs_R", math.nan),
        ("temperature_N", 0.0),
        ("tokens_T", 320),
        ("tokens_T", -1),
    ],
)
def test_a_fault_in_any_field_drops_its_transition_and_no_other(
    checkpoint: Path, loaded: LoadedModel, field: str, value: float
) -> None:
    batch = make_batch(loaded)
    result = trainer_of(loaded).update(poisoned(batch, field, 0, value), grpo(std_normalization=False))
    assert result.dropped[0] is DropReason.NON_FINITE
    assert result.weight_N[0] == 0
    assert result.advantage_N[0] == 0
    assert not any(result.dropped[1:])
    assert all(map(math.isfinite, result.metrics.values()))
    clean = load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0)
    trainer_of(clean).update(subset(batch, np.arange(1, len(batch))), grpo(std_normalization=False))
    expected = weights_of(clean.model)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(loaded.model).items())


def test_what_is_recorded_for_forced_tokens_does_not_matter(loaded: LoadedModel) -> None:
    batch = make_batch(loaded)
    forced = int(np.flatnonzero(~batch.mask_R)[0])
    result = trainer_of(loaded).update(poisoned(batch, "behaviour_logprobs_R", forced, math.nan), grpo(beta=0.0))
    assert not any(result.dropped)
    assert all(map(math.isfinite, result.metrics.values()))


def test_nothing_to_train_on_changes_no_weight(loaded: LoadedModel) -> None:
    before = weights_of(loaded.model)
    batch = make_batch(loaded)
    trainer = trainer_of(loaded, OptimizerSection(learning_rate=1.0, weight_decay=0.5))
    equal = replace(batch, values_N=np.ones(len(batch)))
    for given in (
        equal,
        subset(batch, np.arange(0)),
        poisoned(subset(batch, np.arange(1)), "values_N", 0, math.nan),
    ):
        result = trainer.update(given, grpo())
        assert result.metrics["steps_applied"] == 0
        assert result.metrics["transitions_dropped"] == len(given)
        assert all(map(math.isfinite, result.metrics.values()))
    assert trainer.version == 3
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(loaded.model).items())


class Faulty(Grpo):
    """GRPO whose loss, gradient or advantage breaks."""

    def __init__(self, fault: str) -> None:
        super().__init__(GrpoOptions(beta=0.0, minibatches=2))
        self.fault = fault
        self.left = 1

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().loss(samples, logprobs, advantages_R, weights_R)
        if self.left and self.fault in ("loss", "gradient"):
            self.left -= 1
            zero = (logprobs.current_R - logprobs.current_R.detach()).sum()
            # The square root of zero is finite; its gradient is not.
            loss = loss * math.nan if self.fault == "loss" else loss + zero.abs().sqrt()
        return loss, metrics


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(loaded: LoadedModel, fault: str) -> None:
    before = weights_of(loaded.model)
    result = trainer_of(loaded).update(make_batch(loaded, members=4), Faulty(fault))
    assert (result.metrics["steps_skipped"], result.metrics["steps_applied"]) == (1, 1)
    after = weights_of(loaded.model)
    assert all(torch.isfinite(weight).all() for weight in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(map(math.isfinite, result.metrics.values()))
