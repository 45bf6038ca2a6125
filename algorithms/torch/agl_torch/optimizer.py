"""Optimizer steps: AdamW as the configuration sets it, with copies of low-precision weights in full precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agl_core.config.sections import OptimizerSection, rate_share


class PolicyOptimizer:
    """AdamW with settings as in the configuration.

    A bfloat16 weight keeps about three decimal digits, so a small step would round to nothing: such weights have a
    float32 master, which takes over its gradient in each backward pass, and the step. A schedule of the step size ends
    after `training_steps`.
    """

    def __init__(self, weights: Sequence[nn.Parameter], settings: OptimizerSection, *, training_steps: int = 0) -> None:
        self.settings = settings
        self.steps = 0
        self.training_step = 0
        """The run's step, from 1; the schedule goes by it, whether or not every step had a batch."""
        self.training_steps = training_steps
        self._weights = list(weights)
        self._masters: list[Tensor] = [_master(weight) for weight in self._weights]
        self._pairs = [(w, m) for w, m in zip(self._weights, self._masters, strict=True) if w is not m]
        for weight, master in self._pairs:
            gather: Any = functools.partial(_gather, master)
            weight.register_post_accumulate_grad_hook(gather)  # type: ignore[no-untyped-call]
        self._adamw = torch.optim.AdamW(self._masters, weight_decay=settings.weight_decay)

    def discard(self) -> None:
        for tensor in (*self._weights, *self._masters):
            tensor.grad = None

    def step(self) -> float | None:
        """Clip, step, forget the gradients; returns the norm before clipping, None if it is not finite: no step."""
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self.settings.max_grad_norm))
        if not math.isfinite(grad_norm):
            self.discard()
            return None
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        self.steps += 1
        with torch.no_grad():
            for weight, master in self._pairs:
                weight.copy_(master)
        self.discard()
        return grad_norm

    @property
    def learning_rate(self) -> float:
        """The size of the next step: it grows linearly over the warm-up, and follows the schedule."""
        settings, rate = self.settings, self.settings.learning_rate
        assert rate is not None, "the trainer chooses one"
        steps = (self.steps, self.training_step, self.training_steps)
        return rate * rate_share(settings.schedule, settings.warmup_steps, *steps)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides the weights; tensors and plain values only."""
        return {
            "adamw": self._adamw.state_dict(),
            "steps": self.steps,
            "masters": [master.detach() for _, master in self._pairs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["masters"]) != len(self._pairs):
            raise ValueError(f"{len(state['masters'])} master weights for {len(self._pairs)} low-precision weights")
        self.discard()
        self._adamw.load_state_dict(state["adamw"])
        for group in self._adamw.param_groups:
            group["weight_decay"] = self.settings.weight_decay
        self.steps = state["steps"]
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)


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
