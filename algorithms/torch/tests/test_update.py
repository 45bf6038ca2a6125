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
from agl_algorithms.plugin import DpoOptions, GrpoOptions, PpoOptions
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import subset
from agl_core.protocols import PolicySpec
from agl_core.types import Batch, DropReason
from agl_torch.loading import LoadedModel, load_model
from agl_torch.trainer import PolicyTrainer

from .conftest import RATE, grpo, make_batch, plain_logprobs, trainer_of, weights_of


def plain_entropies(model: Any, batch: Batch, i: int) -> Tensor:
    """[response] of the distributions that each token of transition i is drawn from."""
    ids = torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))[None]
    logits = model(input_ids=ids).logits[0, int(batch.prompt_lengths_N[i]) - 1 : -1]
    return Categorical(logits=logits / float(batch.temperature_N[i])).entropy()


def trained_loss(loaded: LoadedModel, batch: Batch, *, beta: float, entropy: float, reference: Any) -> Tensor:
    """GRPO's loss at ratio 1, one plain forward per transition, everything by hand."""
    total = torch.zeros((), dtype=torch.float64)
    groups = np.unique(batch.group_N)
    for group in groups:
        members = np.unique(batch.rollout_N[batch.group_N == group])
        rewards = np.array([batch.values_N[batch.rollout_N == m][0] for m in members])
        for member, reward in zip(members, rewards, strict=True):
            deviation = rewards.std(ddof=1)
            advantage = (reward - rewards.mean()) / (deviation + 1e-6)
            turns = np.flatnonzero(batch.rollout_N == member)
            for i in turns:
                part = slice(batch.response_offsets[i], batch.response_offsets[i + 1])
                mask = torch.from_numpy(batch.mask_R[part])
                current = plain_logprobs(loaded.model, batch, int(i))[mask]
                per_token = -advantage * torch.exp(current - current.detach())
                if beta:
                    with torch.no_grad():
                        initial = plain_logprobs(reference, batch, int(i))[mask]
                    per_token = per_token + beta * (torch.exp(initial - current) - (initial - current) - 1)
                if entropy:
                    per_token = per_token - entropy * plain_entropies(loaded.model, batch, int(i))[mask]
                total = total + batch.weight_N[i] * per_token.mean() / (len(groups) * len(members) * len(turns))
    return total


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


@pytest.mark.parametrize(
    ("beta", "entropy", "weights"), [(0.0, 0.0, (1.0,)), (0.5, 0.2, (1.0, 0.25, 0.0, 3.0)), (0.0, 0.1, (1.0,))]
)
def test_an_update_equals_a_plain_adamw_loop(
    in_float64: LoadedModel, checkpoint: Path, beta: float, entropy: float, weights: tuple[float, ...]
) -> None:
    settings = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05, warmup_steps=4)
    batch = make_batch(in_float64)
    batch = replace(batch, weight_N=np.resize(weights, len(batch)))
    twin = load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0)
    twin.model.double()
    reference = load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0)
    reference.model.double()
    trainer = trainer_of(in_float64, settings, initial=lambda: reference)
    optimizer = torch.optim.AdamW(twin.model.parameters(), weight_decay=0.1)
    initial = weights_of(twin.model)
    exact = 2e-6 if entropy else 1e-9  # Entropies see that the model's own norms compute in float32.
    for step in range(3):
        result = trainer.update(batch, grpo(beta=beta, entropy=entropy))
        loss = trained_loss(twin, batch, beta=beta, entropy=entropy, reference=reference.model)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1) / 4
        optimizer.step()
        optimizer.zero_grad()
        assert result.version == step + 1
        assert result.metrics["loss"] * result.weight_N.sum() == pytest.approx(loss.item(), abs=exact)
        assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert result.metrics["learning_rate"] == pytest.approx(1e-2 * (step + 1) / 4)
    expected = weights_of(twin.model)
    for name, weight in weights_of(in_float64.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=exact)
    assert any(not torch.equal(expected[name], initial[name]) for name in initial)
    assert torch.equal(reference.model.get_input_embeddings().weight, initial["model.embed_tokens.weight"])


@pytest.mark.parametrize("budget", [60, 10_000])
def test_an_update_of_pairs_equals_a_plain_adamw_loop(in_float64: LoadedModel, checkpoint: Path, budget: int) -> None:
    """DPO's loss of whole rollouts, though micro-batches do not see pairs."""
    batch = make_batch(in_float64, groups=3, members=4)
    twin, reference = (load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0) for _ in range(2))
    twin.model.double()
    reference.model.double()
    trainer = trainer_of(in_float64, initial=lambda: reference, tokens_per_micro_batch=budget)
    optimizer = torch.optim.AdamW(twin.model.parameters(), weight_decay=RATE.weight_decay, lr=1e-2)
    returns = {i: batch.values_N[batch.rollout_N == i].mean() for i in range(12)}
    pairs = [
        (better, worse)
        for better in returns
        for worse in returns
        if better // 4 == worse // 4 and returns[better] > returns[worse]
    ]

    def log_ratio(rollout: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in np.flatnonzero(batch.rollout_N == rollout):
            mask = torch.from_numpy(batch.mask_R[batch.response_offsets[i] : batch.response_offsets[i + 1]])
            current = plain_logprobs(twin.model, batch, int(i))
            total = total + (current - plain_logprobs(reference.model, batch, int(i)).detach())[mask].sum()
        return total

    for _ in range(3):
        result = trainer.update(batch, Dpo(DpoOptions(beta=0.5, margin=0.0)))
        ratios = {rollout: log_ratio(rollout) for rollout in returns}
        margins = torch.stack([0.5 * (ratios[better] - ratios[worse]) for better, worse in pairs])
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), RATE.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert result.metrics["pair_margin"] == pytest.approx(margins.mean().item(), rel=1e-6)
        assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert result.metrics["pair_accuracy"] == (margins > 0).double().mean() > 0.9
    expected = weights_of(twin.model)
    for name, weight in weights_of(in_float64.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_changes_no_result(checkpoint: Path) -> None:
    weights = []
    for checkpointing in (False, True):
        loaded = load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0)
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        loaded.model.model.layers[0].mlp.register_forward_pre_hook(count)
        trainer = trainer_of(loaded, tokens_per_micro_batch=10_000, gradient_checkpointing=checkpointing)
        batch = make_batch(loaded)
        forwards = 0
        trainer.update(batch, grpo())
        weights.append((weights_of(loaded.model), forwards))
    assert weights[1][1] == 2 * weights[0][1]
    assert all(torch.equal(weights[0][0][name], weights[1][0][name]) for name in weights[0][0])


def test_small_steps_are_not_rounded_away_in_bfloat16(checkpoint: Path) -> None:
    loaded = load_model(PolicySpec(str(checkpoint), dtype="bfloat16"), torch.device("cpu"), seed=0)
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


CPU = torch.device("cpu")
SETTINGS = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)


def start(checkpoint: Path, budget: int = 200, dtype: torch.dtype = torch.float32) -> tuple[LoadedModel, PolicyTrainer]:
    """A policy, and its trainer, which gets copies of the initial weights."""

    def load() -> LoadedModel:
        loaded = load_model(PolicySpec(str(checkpoint)), CPU, seed=0)
        return replace(loaded, model=loaded.model.to(dtype), dtype=dtype)

    loaded = load()
    return loaded, trainer_of(loaded, SETTINGS, tokens_per_micro_batch=budget, initial=load)


class PlainCritic:
    """The oracle: one plain forward per transition, AdamW as torch has it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = load_model(PolicySpec(str(checkpoint)), CPU, seed=0).model.double().model
        self.weight = torch.zeros(32, dtype=torch.float64, requires_grad=True)
        self.bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
        parameters = [*self.model.parameters(), self.weight, self.bias]
        self.optimizer = torch.optim.AdamW(parameters, weight_decay=0.1)

    def values(self, batch: Batch, i: int) -> Tensor:
        ids = torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))[None]
        hidden = self.model(input_ids=ids).last_hidden_state[0]
        return hidden[int(batch.prompt_lengths_N[i]) - 1 : -1] @ self.weight + self.bias

    def step(self, batch: Batch, rate: float) -> tuple[float, float]:
        """PPO's value loss at λ = 1 with nothing clipped yet, and the gradient's norm before clipping."""
        loss = torch.zeros((), dtype=torch.float64)
        groups = np.unique(batch.group_N)
        for group in groups:
            members = np.unique(batch.rollout_N[batch.group_N == group])
            for member in members:
                turns = np.flatnonzero(batch.rollout_N == member)
                for i in turns:
                    mask = batch.mask_R[batch.response_offsets[i] : batch.response_offsets[i + 1]]
                    error = (self.values(batch, int(i))[torch.from_numpy(mask)] - batch.values_N[i]) ** 2 / 2
                    loss = loss + error.mean() / (len(groups) * len(members) * len(turns))
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


@pytest.mark.parametrize("budget", [1, 10_000])
def test_an_update_of_a_critic_equals_a_plain_adamw_loop(checkpoint: Path, budget: int) -> None:
    loaded, trainer = start(checkpoint, budget, torch.float64)
    batch = make_batch(loaded)
    plain = PlainCritic(checkpoint)
    for update in range(3):
        metrics = trainer.update(batch, Ppo(PpoOptions(critic_learning_rate=3e-3))).metrics
        rate = 3e-3 * min(1.0, (update + 1) / 2)
        loss, norm = plain.step(batch, rate)
        assert metrics["value_loss"] == pytest.approx(loss, abs=1e-9)
        assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["critic_learning_rate"] == pytest.approx(rate)
        assert metrics["critic_steps_applied"] == 1
    assert metrics["value_mean"] != 0


def test_policy_and_critic_do_not_move_each_other(checkpoint: Path) -> None:
    (one, trainer), (other, other_trainer) = start(checkpoint), start(checkpoint)
    batch = make_batch(one)
    trainer.update(batch, Ppo(PpoOptions(critic_learning_rate=1e-9)))
    other_trainer.update(batch, Ppo(PpoOptions(critic_learning_rate=1e-2, critic_epochs=3)))
    expected = weights_of(other.model)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(one.model).items())


def poisoned(batch: Batch, field: str, index: int, value: float) -> Batch:
    array = getattr(batch, field).copy()
    array[index] = value
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
    """GRPO whose loss or gradient breaks."""

    def __init__(self, fault: str, times: int = 1) -> None:
        super().__init__(GrpoOptions(beta=0.0, minibatches=2))
        self.fault, self.times = fault, times

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().loss(samples, logprobs, advantages_R, weights_R)
        if self.times and self.fault in ("loss", "gradient"):
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
