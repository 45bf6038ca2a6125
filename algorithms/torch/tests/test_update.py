"""An update of policy and critic, against plain loops written here; what is broken in a batch or step is left out."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from agl_algorithms.dpo import Dpo
from agl_algorithms.grpo import Grpo
from agl_algorithms.imitation import Rft
from agl_algorithms.plugin import DpoOptions, GrpoOptions, PpoOptions, ReinforceOptions, RftOptions
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_algorithms.prepared import samples_of
from agl_algorithms.reinforce import Reinforce
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import subset
from agl_core.types import Batch, DropReason
from agl_torch.loading import LoadedModel

from .conftest import (
    grpo,
    load,
    make_batch,
    plain_logits,
    plain_logprobs,
    tokens_of,
    trainer_of,
    weights_of,
)


@pytest.mark.parametrize("steps", [(1, 2, 3, 4, 5), (2, 4)])
def test_the_step_size_falls_along_a_cosine_over_the_runs_steps(in_float64: LoadedModel, steps: tuple[int]) -> None:
    """Steps without a batch for the policy count too; the critic's step size falls as the policy's."""
    settings = OptimizerSection(learning_rate=1e-2, schedule="cosine")
    algorithm = Ppo(PpoOptions(epochs=2, critic_learning_rate=1e-2))
    trainer = trainer_of(in_float64, settings, steps=4, initial=lambda: copy.deepcopy(in_float64))
    batch = make_batch(in_float64)
    half = (1 + 0.5**0.5) / 2
    shares = [1, half, 0.5, 1 - half, 0, 0]
    for step in steps:
        metrics = trainer.update(replace(batch, step=step), algorithm).metrics
        for name in ("learning_rate", "critic_learning_rate"):
            assert metrics[name] == pytest.approx(1e-2 * shares[step - 1], abs=1e-12)


class PlainLoop:
    """The oracle of passes and steps: a plain forward pass of each transition, the loss of all at once, torch's AdamW.

    It uses the algorithms' formulas, whose oracles are in tests/oracles.
    """

    def __init__(self, checkpoint: Path, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.model, self.reference = (load(checkpoint).model.double() for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1)

    def step(self, batch: Batch, rate: float) -> tuple[float, float, Mapping[str, float]]:
        """Loss, the gradient's norm before clipping, and what was measured before the step."""
        samples, everything = samples_of(batch, dtype=torch.float64), range(len(batch))
        current_R = torch.cat([plain_logprobs(self.model, batch, i) for i in everything])
        with torch.no_grad():
            reference_R = torch.cat([plain_logprobs(self.reference, batch, i) for i in everything])
        entropy_R = torch.cat([Categorical(logits=plain_logits(self.model, batch, i)).entropy() for i in everything])
        logprobs = Logprobs(current_R, current_R.detach(), samples.behaviour_R, reference_R, entropy_R)
        weights_R = self.algorithm.weights(samples) * torch.from_numpy(batch.weight_N)[samples.transition_R]
        advantages_R, measured = self.algorithm.advantages(samples), dict[str, Tensor]()
        if self.algorithm.needs_scores:
            advantages_R, measured = self.algorithm.rescore(samples, logprobs, advantages_R, weights_R)
        loss, _ = self.algorithm.loss(samples, logprobs, advantages_R, weights_R)
        norm = stepped(self.optimizer, loss, rate, 0.05)
        return loss.item(), norm, {name: value.item() for name, value in measured.items()}


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float, max_norm: float) -> float:
    """The gradient's norm before clipping."""
    loss.backward()  # type: ignore[no-untyped-call]
    (group,) = optimizer.param_groups
    norm = torch.nn.utils.clip_grad_norm_(group["params"], max_norm)
    group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@pytest.mark.parametrize(
    "algorithm",
    [
        grpo(),
        grpo(beta=0.5, entropy=0.2),
        Reinforce(ReinforceOptions(clip=0.1)),
        Rft(RftOptions(top_k=1)),
        Dpo(DpoOptions(beta=0.5)),
    ],
    ids=["GRPO", "GRPO with KL and entropy", "REINFORCE++", "RFT", "DPO"],
)
def test_an_update_equals_a_plain_adamw_loop(in_float64: LoadedModel, checkpoint: Path, algorithm: Any) -> None:
    settings = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=4)
    batch = make_batch(in_float64, groups=3, members=4)
    if not algorithm.needs_scores:
        batch = replace(batch, weight_N=np.resize([1.0, 0.25, 0.0, 3.0], len(batch)))
    loop, initial = PlainLoop(checkpoint, algorithm), weights_of(in_float64.model)
    reference = replace(in_float64, model=copy.deepcopy(in_float64.model))
    trainer = trainer_of(in_float64, settings, tokens_per_micro_batch=60, initial=lambda: reference)
    for step in range(3):
        result = trainer.update(batch, algorithm)
        loss, norm, measured = loop.step(batch, 1e-2 * (step + 1) / 4)
        assert result.version == step + 1
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert result.metrics["learning_rate"] == pytest.approx(1e-2 * (step + 1) / 4)
        assert {name: result.metrics[name] for name in measured} == pytest.approx(measured, rel=1e-6, abs=1e-6)
        if "loss" not in measured:
            assert result.metrics["loss"] * result.weight_N.sum() == pytest.approx(loss, abs=2e-6)
    expected = weights_of(loop.model)
    for name, weight in weights_of(in_float64.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=2e-6)
    assert any(not torch.equal(expected[name], initial[name]) for name in initial)
    assert all(torch.equal(weight, initial[name]) for name, weight in weights_of(reference.model).items())


def test_gradient_checkpointing_changes_no_result(checkpoint: Path) -> None:
    weights, forwards = [], list[list[Any]]()
    for checkpointing in (False, True):
        loaded = load(checkpoint)
        trainer = trainer_of(loaded, tokens_per_micro_batch=10_000, gradient_checkpointing=checkpointing)
        batch = make_batch(loaded)
        forwards.append([])
        loaded.model.model.layers[0].mlp.register_forward_pre_hook(lambda *call: forwards[-1].append(call))
        trainer.update(batch, grpo())
        weights.append(weights_of(loaded.model))
    assert len(forwards[1]) == 2 * len(forwards[0]) > 0
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_small_steps_are_not_rounded_away_in_bfloat16(checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype="bfloat16")
    before = weights_of(loaded.model)
    trainer = trainer_of(loaded, OptimizerSection(learning_rate=1.5e-3))
    batch = make_batch(loaded)
    result = trainer.update(batch, grpo())
    assert result.metrics["logprob_gap_max"] < 0.1
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(weights_of(loaded.model)[norm], before[norm])  # 1 - 0.0015 is 1 in bfloat16
    for _ in range(5):
        trainer.update(batch, grpo())
    # Such steps do add up, in the master.
    assert not torch.equal(weights_of(loaded.model)[norm], before[norm])
    assert loaded.model.get_input_embeddings().weight.dtype == torch.bfloat16


class PlainCritic:
    """The oracle: one plain forward per transition, AdamW as torch has it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = load(checkpoint).model.double().model
        self.weight = torch.zeros(32, dtype=torch.float64, requires_grad=True)
        self.bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
        parameters = [*self.model.parameters(), self.weight, self.bias]
        self.optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)

    def values(self, batch: Batch, i: int) -> Tensor:
        hidden = self.model(input_ids=tokens_of(batch, i)[None]).last_hidden_state[0]
        return hidden[int(batch.prompt_lengths_N[i]) - 1 : -1] @ self.weight + self.bias

    def step(self, batch: Batch, ppo: Ppo, rate: float) -> tuple[float, float]:
        """Loss, and the gradient's norm before clipping."""
        samples = samples_of(batch, dtype=torch.float64)
        values_R = torch.cat([self.values(batch, i) for i in range(len(batch))])
        targets_R = ppo.value_targets(samples, values_R.detach())
        loss, _ = ppo.value_loss(values_R, values_R.detach(), targets_R, ppo.value_weights(samples))
        return loss.item(), stepped(self.optimizer, loss, rate, 1.0)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_an_update_of_a_critic_equals_a_plain_adamw_loop(
    in_float64: LoadedModel, checkpoint: Path, budget: int
) -> None:
    settings = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
    reference = replace(in_float64, model=copy.deepcopy(in_float64.model))
    trainer = trainer_of(in_float64, settings, tokens_per_micro_batch=budget, initial=lambda: reference)
    batch = make_batch(in_float64)
    plain, ppo = PlainCritic(checkpoint), Ppo(PpoOptions(critic_learning_rate=3e-3, lam=0.9))
    for update in range(3):
        metrics = trainer.update(batch, ppo).metrics
        rate = 3e-3 * min(1.0, (update + 1) / 2)
        loss, norm = plain.step(batch, ppo, rate)
        assert metrics["value_loss"] == pytest.approx(loss, abs=1e-9)
        assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["critic_learning_rate"] == pytest.approx(rate)
        assert metrics["critic_steps_applied"] == 1
    assert metrics["value_mean"] != 0


def poisoned(batch: Batch, field: str, index: int, value: float) -> Batch:
    array = getattr(batch, field).copy()
    array[index] = value
    return replace(batch, **{field: array})


@pytest.mark.parametrize(
    ("field", "value"), [("behaviour_logprobs_R", math.nan), ("temperature_N", 0), ("tokens_T", 320), ("tokens_T", -1)]
)
def test_a_fault_in_any_field_drops_its_transition_and_no_other(
    checkpoint: Path, loaded: LoadedModel, field: str, value: float
) -> None:
    batch = make_batch(loaded)
    result = trainer_of(loaded).update(poisoned(batch, field, 0, value), grpo(std_normalization=False))
    assert result.dropped[0] is DropReason.NON_FINITE
    assert result.weight_N[0] == result.advantage_N[0] == 0
    assert not any(result.dropped[1:])
    assert all(map(math.isfinite, result.metrics.values()))
    clean = load(checkpoint)
    others = subset(batch, np.arange(1, len(batch)))
    compared = replace(others, absent_values_A=batch.values_N[:1], absent_groups_A=batch.group_N[:1])
    trainer_of(clean).update(compared, grpo(std_normalization=False))
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
    for given in (replace(batch, values_N=np.ones(len(batch))), subset(batch, np.arange(0))):
        result = trainer.update(given, grpo())
        assert result.metrics["steps_applied"] == 0
        assert result.metrics["transitions_dropped"] == len(given)
        assert all(map(math.isfinite, result.metrics.values()))
    assert trainer.version == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(loaded.model).items())


class Faulty(Grpo):
    """GRPO whose loss or gradient breaks."""

    def __init__(self, fault: str, times: int = 1) -> None:
        super().__init__(GrpoOptions(beta=0.0, minibatches=2))
        self.fault, self.times = fault, times

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().loss(samples, logprobs, advantages_R, weights_R)
        if self.times:
            self.times -= 1
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
    untrained = trainer_of(loaded).update(make_batch(loaded, members=4), Faulty(fault, times=9))
    assert (untrained.metrics["transitions_trained"], untrained.weight_N.any()) == (0, 0)
    assert DropReason.NON_FINITE in untrained.dropped
