"""How far a policy went: recorded replies scored by other weights, and what holds it near its initial ones."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from agl_algorithms.plugin import ReinforceOptions
from agl_algorithms.reinforce import Reinforce
from agl_core.config.policies import OptimizerSection
from agl_torch.models.loading import LoadedModel

from .conftest import make_batch, plain_logprobs, trainer_of, weights_of


def test_recorded_replies_are_scored_as_by_plain_forwards(in_float64: LoadedModel) -> None:
    batch = make_batch(in_float64, noise=0.5)
    plain = torch.cat([plain_logprobs(in_float64.model, batch, i) for i in range(len(batch))]).detach()
    before = weights_of(in_float64.model)
    assert trainer_of(in_float64).logprobs(batch) == pytest.approx(plain.numpy(), abs=1e-9)
    after = weights_of(in_float64.model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_kl_anchor_holds_the_policy_near_its_initial_weights(in_float64: LoadedModel) -> None:
    """REINFORCE++, as of sessions of real use: the same updates, with and without it."""
    batch = make_batch(in_float64)

    def distance(beta: float) -> float:
        loaded = replace(in_float64, model=copy.deepcopy(in_float64.model))
        trainer = trainer_of(loaded, OptimizerSection(learning_rate=1e-2), initial=lambda: in_float64)
        algorithm = Reinforce(ReinforceOptions(beta=beta, importance_cap=2.0))
        for _ in range(8):
            trainer.update(batch, algorithm)
        change_R = trainer.logprobs(batch) - trainer_of(in_float64).logprobs(batch)
        return float(np.mean(np.expm1(change_R) - change_R))

    assert distance(5.0) < 0.5 * distance(0.0)
