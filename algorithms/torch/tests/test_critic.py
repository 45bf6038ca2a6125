"""The critic of a policy, against plain loops written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_algorithms.plugin import PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.config.sections import OptimizerSection
from agl_core.protocols import PolicySpec
from agl_core.types import Batch
from agl_torch.loading import LoadedModel, load_model
from agl_torch.trainer import PolicyTrainer

from .conftest import make_batch, trainer_of, weights_of

CPU = torch.device("cpu")
SETTINGS = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)


def ppo(**options: Any) -> Ppo:
    return Ppo(PpoOptions(**({"critic_learning_rate": 1e-2} | options)))


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
def test_an_update_equals_a_plain_adamw_loop(checkpoint: Path, budget: int) -> None:
    loaded, trainer = start(checkpoint, budget, torch.float64)
    batch = make_batch(loaded)
    plain = PlainCritic(checkpoint)
    for update in range(3):
        metrics = trainer.update(batch, ppo(critic_learning_rate=3e-3)).metrics
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
    trainer.update(batch, ppo(critic_learning_rate=1e-9))
    other_trainer.update(batch, ppo(critic_learning_rate=1e-2, critic_epochs=3))
    expected = weights_of(other.model)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(one.model).items())
