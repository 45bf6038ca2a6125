"""The memory that training passes may take, and how far an update is."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agl_algorithms.policy_gradient import Algorithm
from agl_algorithms.ppo import Ppo
from agl_core.errors import EngineError
from agl_core.protocols import Progress

ACTIVATIONS_ON_CPU = 2**29
"""Bytes of one training pass."""
TOKENS_ON_CPU = 1280
"""Tokens of one training pass at most. With more, a small model's activations leave the caches, and their memory comes
anew from the system in each pass: 60,000 page faults and an eighth of the time in an update of 5,000 tokens."""
ACTIVATIONS_ON_GPU = 1 / 8
CACHE = 1 / 10
"""Shares of the device's memory."""
_PROBED_TOKENS = 16


def device_memory(device: torch.device) -> int:
    """Bytes of memory, used and free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tokens_per_pass(model: Any, device: torch.device) -> int:
    """How many tokens a training pass may have: those whose activations take the share of memory meant for them."""
    if device.type == "cuda":
        return max(1, int(ACTIVATIONS_ON_GPU * device_memory(device) / activation_bytes(model, device)))
    return max(1, min(TOKENS_ON_CPU, int(ACTIVATIONS_ON_CPU / activation_bytes(model, device))))


def activation_bytes(model: Any, device: torch.device) -> float:
    """The bytes per token that a training pass keeps for the backward pass, without logits; measured on a few tokens.

    Weights do not count, and what several operations keep counts once.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it, so that no other gets its address
        return tensor

    def one_position(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][:, :1], *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(one_position)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.long, device=device)
            model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights) / _PROBED_TOKENS


def recompute_layers(model: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them.

    transformers does this in train mode alone, in which some models have dropout or noise of their own.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} has no layers that can be recomputed: set engine.torch.gradient_checkpointing = "
            f"false."
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **settings)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **settings)


BACKWARD_COST = 2.0
"""A backward pass takes about as long as two forward passes."""


def passes_of(algorithm: Algorithm) -> float:
    """The cost of an update per token, in forward passes over it."""
    steps = algorithm.epochs * algorithm.minibatches
    passes = (1 + BACKWARD_COST) * algorithm.epochs + algorithm.needs_reference + (steps > 1 or algorithm.needs_scores)
    passes += algorithm.needs_scores and algorithm.teacher is not None
    if algorithm.needs_critic:
        passes += 1 + (1 + BACKWARD_COST) * cast(Ppo, algorithm).critic_epochs
    return passes


class Work:
    """How far an update is, and how long its phases took.

    `total` is the whole update in forward passes over one token.
    """

    def __init__(self, progress: Progress | None, total: float = 0.0) -> None:
        self._progress = progress
        self._total, self._done = total, 0.0
        self._started = self._lap_started = time.perf_counter()
        self._seconds = defaultdict[str, float](float)

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
        self._seconds[f"seconds_{phase}"] += now - self._lap_started
        self._lap_started = now

    def seconds(self) -> dict[str, float]:
        return self._seconds | {"seconds_update": time.perf_counter() - self._started}
