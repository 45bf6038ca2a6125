"""Optimizer steps: AdamW with copies in full precision, a training pass of any module, and how far an update is."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agl_algorithms.policy_gradient import PolicyGradient
from agl_algorithms.ppo import Ppo
from agl_algorithms.prepared import Prepared
from agl_core.config.sections import OptimizerSection
from agl_core.protocols import Progress
from agl_torch.training.batching import Limits, MicroBatch, micro_batches

BACKWARD_COST = 2.0
"""A backward pass takes about as long as two forward passes."""


def passes_of(algorithm: PolicyGradient) -> float:
    """What an update takes of each token, in forward passes over it."""
    steps = algorithm.epochs * algorithm.minibatches
    passes = (1 + BACKWARD_COST) * algorithm.epochs + algorithm.needs_reference + (steps > 1)
    if algorithm.needs_critic:
        passes += 1 + (1 + BACKWARD_COST) * cast(Ppo, algorithm).critic_epochs
    return passes


class PolicyOptimizer:
    """AdamW with settings as in the configuration.

    A bfloat16 weight keeps about three decimal digits, so a small step would round to nothing: such weights have a
    float32 master, which takes over its gradient in each backward pass, and the step.

    `training_steps` is how many the run has: what a schedule of the step size ends with.
    """

    def __init__(self, weights: Sequence[nn.Parameter], settings: OptimizerSection, *, training_steps: int = 0) -> None:
        self.settings = settings
        self.steps = 0
        self.training_step = 0
        """The run's, from 1: what the schedule goes by, whether or not every step had a batch."""
        self.training_steps = training_steps
        self._weights = list(weights)
        self._masters: list[Tensor] = [_master(weight) for weight in self._weights]
        for weight, master in self._pairs():
            gather: Any = functools.partial(_gather, master)
            weight.register_post_accumulate_grad_hook(gather)  # type: ignore[no-untyped-call]
        self._adamw = torch.optim.AdamW(self._masters, lr=self._full_rate, weight_decay=settings.weight_decay)

    def discard(self) -> None:
        """Forget the gradients gathered so far."""
        for tensor in (*self._weights, *self._masters):
            tensor.grad = None

    def step(self) -> float | None:
        """Clip, step, forget the gradients. The gradient's norm before clipping; None if it is not finite: nothing
        changed."""
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self.settings.max_grad_norm))
        if not math.isfinite(grad_norm):
            self.discard()
            return None
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self.steps += 1
        with torch.no_grad():
            for weight, master in self._pairs():
                weight.copy_(master)
        self.discard()
        return grad_norm

    @property
    def _full_rate(self) -> float:
        if self.settings.learning_rate is None:
            raise ValueError("no learning rate was chosen")
        return self.settings.learning_rate

    @property
    def learning_rate(self) -> float:
        """Of the next step: it grows linearly over the warm-up, and follows the schedule."""
        settings = self.settings
        warm = min(1.0, (self.steps + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
        if settings.schedule == "constant":
            return self._full_rate * warm
        done = min(1.0, max(0, self.training_step - 1) / max(1, self.training_steps))
        return self._full_rate * warm * (1 + math.cos(math.pi * done)) / 2

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the weights; tensors and plain values only."""
        return {
            "adamw": self._adamw.state_dict(),
            "steps": self.steps,
            "masters": [master.detach() for _, master in self._pairs()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = self._pairs()
        if len(state["masters"]) != len(pairs):
            raise ValueError(f"{len(state['masters'])} master weights for {len(pairs)} low-precision weights")
        self.discard()
        self._adamw.load_state_dict(state["adamw"])
        for group in self._adamw.param_groups:
            group["weight_decay"] = self.settings.weight_decay
        self.steps = state["steps"]
        with torch.no_grad():
            for (_, master), saved in zip(pairs, state["masters"], strict=True):
                master.copy_(saved)

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each low-precision weight and its master."""
        return [(w, m) for w, m in zip(self._weights, self._masters, strict=True) if w is not m]


def _gather(master: Tensor, weight: Tensor) -> None:
    """Take over the gradient of a weight as soon as a backward pass has it, so that few exist twice."""
    if weight.grad is not None:
        gradient = weight.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None


def _master(weight: nn.Parameter) -> Tensor:
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    return weight.detach().to(torch.float32, copy=True).requires_grad_()


def train(
    module: nn.Module,
    optimizer: PolicyOptimizer,
    prepared: Prepared,
    weights_R: Tensor,
    steps: Iterable[NDArray[np.int64]],
    limits: Limits,
    loss_of: Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]],
    work: Work,
) -> dict[str, float]:
    """One optimizer step on each of `steps`, its transitions; one whose loss or gradient is not finite is skipped.

    `weights_R` are the loss's token weights over the whole batch, before corrections. `loss_of` gets a micro-batch and
    its tokens' weights in the step, and returns the sum over tokens of weight × loss, and such sums of metrics (of
    `…_max`: the largest). Metrics: their means over the tokens of the steps that were applied, by weight, and
    grad_norm (before clipping, the mean over steps), learning_rate (of the last step), steps_applied, steps_skipped.
    """
    sums: dict[str, float] = {}
    weight, skipped, rate = 0.0, 0, optimizer.learning_rate
    grad_norms: list[float] = []
    module.train()  # Gradient checkpointing asks for it.
    try:
        for chosen in steps:
            step_weights_R = prepared.step_weights(weights_R, [chosen])
            step_rate, grad_norm = optimizer.learning_rate, None
            step_sums, step_weight = dict[str, float](), 0.0
            for micro in micro_batches(prepared.batch, chosen, limits, weights_R.device):
                token_weights_R = step_weights_R[micro.tokens_R]
                with torch.enable_grad():
                    loss, measured = loss_of(micro, token_weights_R)
                if not torch.isfinite(loss):
                    break
                loss.backward()  # type: ignore[no-untyped-call]
                step_weight += float(token_weights_R.sum())
                _add(step_sums, {name: tensor.detach().item() for name, tensor in measured.items()})
                work.advance(micro.tokens, 1 + BACKWARD_COST)
            else:
                grad_norm = optimizer.step()
            if grad_norm is None:
                optimizer.discard()
                skipped += 1
                continue
            _add(sums, step_sums)
            weight, rate = weight + step_weight, step_rate
            grad_norms.append(grad_norm)
    finally:
        optimizer.discard()
        module.eval()
    means = {name: total if name.endswith("_max") else total / weight for name, total in sums.items()}
    if grad_norms:
        means["grad_norm"] = sum(grad_norms) / len(grad_norms)
    return means | {
        "learning_rate": rate,
        "steps_applied": float(len(grad_norms)),
        "steps_skipped": float(skipped),
    }


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        if name.endswith("_max"):
            sums[name] = max(sums.get(name, value), value)
        else:
            sums[name] = sums.get(name, 0.0) + value


class Work:
    """How far an update is, and how long its phases took.

    `total` is the whole update in forward passes over one token.
    """

    def __init__(self, progress: Progress | None, total: float = 0.0) -> None:
        self._progress = progress
        self._total, self._done = total, 0.0
        self._started = self._lap_started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def advance(self, tokens: int, cost: float) -> None:
        """`tokens` went through a pass that costs `cost` times a forward pass."""
        self._done += tokens * cost
        if self._progress is not None:
            self._progress(min(1.0, self._done / self._total))

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(1.0)

    def lap(self, phase: str) -> None:
        """A phase, or another part of it, ended."""
        now = time.perf_counter()
        name = f"seconds_{phase}"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._lap_started
        self._lap_started = now

    def seconds(self) -> dict[str, float]:
        return self._seconds | {"seconds_update": time.perf_counter() - self._started}
