"""The critic of a policy, against plain loops written here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions, PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.config.policies import OptimizerSection
from agl_core.protocols import PolicySpec
from agl_core.types import Batch
from agl_torch.models.loading import LoadedModel, load_model
from agl_torch.training.trainer import PolicyTrainer, load_policy, save_policy

from .conftest import LORA, make_batch, weights_of
from .test_checkpoints import flattened

CPU = torch.device("cpu")
SETTINGS = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": LORA},
}


def ppo(**options: Any) -> Ppo:
    return Ppo(PpoOptions(**({"critic_learning_rate": 1e-2} | options)))


class Started:
    """A policy, its trainer, and every copy of the initial weights that was asked for."""

    def __init__(self, checkpoint: Path, *, budget: int = 200, double: bool = False, **spec: Any) -> None:
        self.copies: list[LoadedModel] = []

        def load() -> LoadedModel:
            loaded = load_model(PolicySpec(str(checkpoint), **spec), CPU, seed=0)
            return replace(loaded, model=loaded.model.double(), dtype=torch.float64) if double else loaded

        def initial() -> LoadedModel:
            self.copies.append(load())
            return self.copies[-1]

        self.loaded = load()
        self.trainer = PolicyTrainer(self.loaded, SETTINGS, tokens_per_micro_batch=budget, initial=initial)


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
def test_an_update_equals_a_plain_adamw_loop(checkpoint: Path, budget: int) -> None:
    started = Started(checkpoint, budget=budget, double=True)
    batch = make_batch(started.loaded)
    plain = PlainCritic(checkpoint)
    for update in range(3):
        metrics = started.trainer.update(batch, ppo(critic_learning_rate=3e-3)).metrics
        rate = 3e-3 * min(1.0, (update + 1) / 2)
        loss, norm = plain.step(batch, rate)
        assert metrics["value_loss"] == pytest.approx(loss, abs=1e-9)
        assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["critic_learning_rate"] == pytest.approx(rate)
        assert metrics["critic_steps_applied"] == 1
    assert metrics["value_mean"] != 0


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("float32", {"across_calls": True})], ids=str
)
def test_it_learns_a_fixed_batch(checkpoint: Path, kind: str, options: dict[str, Any]) -> None:
    started = Started(checkpoint, **KINDS[kind])
    batch = make_batch(started.loaded)
    first = started.trainer.update(batch, ppo(**options)).metrics
    # All values are 0 before the first update, which explains nothing.
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert first["value_mean"] == 0.0
    for _ in range(12):
        last = started.trainer.update(batch, ppo(critic_epochs=3, value_clip=None, **options)).metrics
    assert last["value_loss"] < 0.3 * first["value_loss"]
    assert last["explained_variance"] > 0.3


def test_across_calls_only_the_ends_of_prompts_are_learned(checkpoint: Path) -> None:
    # What the critic is asked about later tokens does not matter: the loss is that of the prompts' values alone.
    started = Started(checkpoint, double=True)
    batch = make_batch(started.loaded)
    metrics = started.trainer.update(batch, ppo(across_calls=True)).metrics
    expected = 0.0
    for member in np.unique(batch.rollout_N):
        rewards = batch.values_N[batch.rollout_N == member]
        to_come = np.cumsum(rewards[::-1])[::-1]
        expected += float((to_come**2 / 2).mean()) / 6
    assert metrics["value_loss"] == pytest.approx(expected, abs=1e-9)


def test_a_critic_is_made_only_when_one_is_needed(checkpoint: Path) -> None:
    started = Started(checkpoint)
    batch = make_batch(started.loaded)
    started.trainer.update(batch, Grpo(GrpoOptions(beta=0)))
    assert not started.copies
    assert started.trainer.state_dict()["critic"] is None
    started.trainer.update(batch, ppo())
    started.trainer.update(batch, ppo())
    assert len(started.copies) == 1


def test_policy_and_critic_do_not_move_each_other(checkpoint: Path) -> None:
    one, other = Started(checkpoint), Started(checkpoint)
    batch = make_batch(one.loaded)
    one.trainer.update(batch, ppo(critic_learning_rate=1e-9))
    other.trainer.update(batch, ppo(critic_learning_rate=1e-2, critic_epochs=3))
    expected = weights_of(other.loaded.model)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(one.loaded.model).items())


def test_with_lora_only_an_adapter_and_the_head_are_trained(checkpoint: Path) -> None:
    started = Started(checkpoint, lora=LORA)
    batch = make_batch(started.loaded)
    started.trainer.update(batch, ppo(critic_epochs=2))
    copy = started.copies[0].model
    initial = weights_of(load_model(PolicySpec(str(checkpoint), lora=LORA), CPU, seed=0).model)
    moved = {name for name, weight in weights_of(copy).items() if not torch.equal(weight, initial[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    adapter = [name for name in initial if "lora_" in name]
    assert len(started.trainer.state_dict()["critic"]["weights"]) == len(adapter) + 2


def test_a_checkpoint_without_a_critic_takes_it_away(checkpoint: Path, tmp_path: Path) -> None:
    started = Started(checkpoint)
    save_policy(tmp_path / "p", started.loaded, started.trainer)
    batch = make_batch(started.loaded)
    fresh = started.trainer.update(batch, ppo()).metrics
    load_policy(tmp_path / "p", started.loaded, started.trainer)
    assert started.trainer.state_dict()["critic"] is None
    again = started.trainer.update(batch, ppo()).metrics
    assert again["explained_variance"] == fresh["explained_variance"]


def test_a_value_loss_that_is_not_finite_is_skipped_and_counted(checkpoint: Path) -> None:
    class Faulty(Ppo):
        left = 1

        def value_loss(self, *tensors: Tensor) -> Any:
            loss, metrics = super().value_loss(*tensors)
            self.left -= 1
            return (loss * math.nan if self.left >= 0 else loss), metrics

    started = Started(checkpoint, budget=10_000)
    result = started.trainer.update(make_batch(started.loaded), Faulty(PpoOptions(critic_epochs=3)))
    assert result.metrics["critic_steps_skipped"] == 1
    assert result.metrics["critic_steps_applied"] == 2
    assert all(torch.isfinite(each).all() for each in flattened(started.trainer.state_dict()))
