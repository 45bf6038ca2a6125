"""A policy's critic: what it says about prompts and responses, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agl_algorithms.interface import CriticAlgorithm
from agl_algorithms.ppo import explained_variance
from agl_algorithms.prepared import Prepared, minibatches
from agl_core.config.policies import OptimizerSection
from agl_core.types import Batch
from agl_torch.models.loading import LoadedModel
from agl_torch.training.batching import Limits, MicroBatch, micro_batches, read_values
from agl_torch.training.optimizer import PolicyOptimizer, Work, train


class Critic:
    """The policy's own architecture, from the initial weights, with a scalar head instead of the output layer.

    It is trained as the policy is: all its weights, or for a policy with a LoRA adapter an adapter of the same shape
    on the same base. The head starts at zero, and so do all values.

    `loaded` is a fresh copy of the initial weights, which the critic takes over.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: OptimizerSection,
        *,
        steps: int = 0,
        tokens_per_micro_batch: int,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self._device = loaded.device
        self._seed = seed
        causal = loaded.model.get_base_model() if loaded.has_adapter else loaded.model
        self._backbone: Any = causal.base_model
        # Made on no device, because its usual random weights would advance the random state.
        self._limits = replace(Limits.of(causal, tokens_per_micro_batch, loaded.context_length), vocabulary=1)
        head = nn.Linear(
            causal.get_output_embeddings().weight.shape[1],
            1,
            device="meta",
            dtype=torch.promote_types(loaded.dtype, torch.float32),
        )
        self._head = head.to_empty(device=loaded.device)
        for parameter in self._head.parameters():
            nn.init.zeros_(parameter)
        if gradient_checkpointing:
            self._backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._trained = [p for module in (self._backbone, self._head) for p in module.parameters() if p.requires_grad]
        self._optimizer = PolicyOptimizer(self._trained, settings, training_steps=steps)

    def values(self, batch: Batch, work: Work) -> Tensor:
        """[R] the value of the state before each response token, without gradient."""
        values_R = torch.zeros(int(batch.response_offsets[-1]), dtype=self._head.weight.dtype, device=self._device)
        with torch.no_grad():
            for micro in micro_batches(batch, np.arange(len(batch)), self._limits, self._device):
                values_R[micro.tokens_R] = read_values(self._backbone, self._head, micro)
                work.advance(micro.tokens, 1)
        return values_R

    def train(self, prepared: Prepared, algorithm: CriticAlgorithm, version: int, work: Work) -> dict[str, float]:
        """Learn what the algorithm made of a batch; a step whose loss or gradient is not finite is skipped.

        `version` makes the minibatches of each update others. Metrics: those of the value loss, explained_variance
        (of the values before; absent where all targets are equal), and critic_grad_norm, critic_learning_rate,
        critic_steps_applied, critic_steps_skipped.
        """
        training = prepared.value
        if training is None:
            return {}
        values_R, targets_R, weights_R = training.values_R, training.targets_R, training.weights_R
        rate = {"learning_rate": algorithm.critic_learning_rate}
        self._optimizer.settings = self._optimizer.settings.model_copy(update=rate)
        self._optimizer.training_step = prepared.batch.step

        def loss_of(micro: MicroBatch, token_weights_R: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            current_R = read_values(self._backbone, self._head, micro)
            return algorithm.value_loss(current_R, values_R[micro.tokens_R], targets_R[micro.tokens_R], token_weights_R)

        seed = [self._seed, version]
        steps = (
            chosen
            for _ in range(algorithm.critic_epochs)
            for chosen in minibatches(prepared.batch, prepared.trained, algorithm.minibatches, seed)
        )
        measured = train(self._backbone, self._optimizer, prepared, weights_R, steps, self._limits, loss_of, work)
        metrics = {name if name.startswith("value_") else f"critic_{name}": value for name, value in measured.items()}
        explained = explained_variance(values_R, targets_R, prepared.corrected(weights_R))
        return metrics if np.isnan(explained) else metrics | {"explained_variance": explained}

    def state_dict(self) -> dict[str, Any]:
        """Trained weights and optimizer; tensors and plain values only."""
        return {"weights": [weight.detach() for weight in self._trained], "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for weight, saved in zip(self._trained, state["weights"], strict=True):
                weight.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
