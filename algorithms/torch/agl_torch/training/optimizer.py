"""AdamW over a policy's trained weights: clipping, warm-up and schedule, and copies in full precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agl_core.config.policies import OptimizerSection


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    applied: bool
    """False if the gradient was not finite; then nothing changed."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float


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
        self._training_steps = training_steps
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

    def step(self) -> StepReport:
        """Clip, step if the gradient is finite, forget the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self.settings.max_grad_norm)
        grad_norm = float(norm)
        rate = self.learning_rate
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self.steps += 1
            with torch.no_grad():
                for weight, master in self._pairs():
                    weight.copy_(master)
        self.discard()
        return StepReport(applied, grad_norm, rate)

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
        done = min(1.0, max(0, self.training_step - 1) / max(1, self._training_steps))
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
