"""Memory and time of a run on a device: bytes by arithmetic, seconds by timing; and how far an update is."""

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
from agl_core.types import Workload
from agl_torch.loading import LoadedModel

ACTIVATIONS_ON_CPU = 2**29
"""Bytes of one training pass. More makes passes no faster: a core is busy with far fewer tokens."""
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
    bound = ACTIVATIONS_ON_GPU * device_memory(device) if device.type == "cuda" else ACTIVATIONS_ON_CPU
    return max(1, int(bound / activation_bytes(model, device)))


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


PROCESS = 500 * 2**20
"""Bytes of Python, torch and transformers without a model."""
FULL_PRECISION = 4
"""Bytes of a float32: of a gradient, of each of AdamW's two moments, and of the master of a smaller weight."""
LOGITS = 2**28
"""Bytes of the logits that exist at the same time, with copies (`agl_torch.batching`)."""
DECODING = 2.5
"""Time to sample a token, in times of one of a long forward pass; measured on a CPU with 64 rows of a 135M model."""
STEP_SECONDS = 1e-8
"""Of an optimizer step, for each trained weight, measured on a CPU."""
_TIMED_TOKENS, _TIMED_PASSES = 128, 3


def memory_bytes(loaded: LoadedModel, algorithm: Algorithm, *, tokens_per_pass: int, cache: int) -> int:
    """The most that one policy takes, while it trains or while it samples: an update has the cache's memory."""
    weights = sum(weight.nbytes for weight in loaded.model.parameters())
    trained = [weight for weight in loaded.model.parameters() if weight.requires_grad]
    gradients = sum(weight.numel() * FULL_PRECISION for weight in trained)
    masters = sum(weight.numel() * FULL_PRECISION for weight in trained if weight.element_size() < FULL_PRECISION)
    copies = int(algorithm.needs_reference and not loaded.has_adapter) + int(algorithm.needs_critic)
    optimizers = (2 * gradients + masters) * (1 + algorithm.needs_critic)
    update = gradients + tokens_per_pass * activation_bytes(loaded.model, loaded.device) + LOGITS
    return int(weights * (1 + copies) + optimizers + max(update, cache))


def seconds(loaded: LoadedModel, algorithm: Algorithm, work: Workload) -> float:
    """Of sampling and training; in both, the rollouts of a group share its prompt."""
    token = token_seconds(loaded.model, loaded.device)
    groups = work.groups * work.steps
    sampled_groups = 0 if work.is_recorded else groups
    sampled = (sampled_groups * work.group_size + work.evaluated) * work.response_tokens * DECODING
    read = (sampled_groups + work.evaluated) * work.prompt_tokens
    learned = groups * (work.prompt_tokens + work.group_size * work.response_tokens) * passes_of(algorithm)
    trained = sum(weight.numel() for weight in loaded.model.parameters() if weight.requires_grad)
    steps = work.steps * algorithm.epochs * algorithm.minibatches
    return float(token * (sampled + read + learned) + STEP_SECONDS * trained * steps)


@torch.inference_mode()
def token_seconds(model: Any, device: torch.device) -> float:
    """Of one token of a forward pass: the fastest of a few passes, the first of which also allocates."""
    ids = torch.zeros(1, _TIMED_TOKENS, dtype=torch.long, device=device)
    durations = []
    for _ in range(_TIMED_PASSES):
        started = time.perf_counter()
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - started)
    return min(durations) / _TIMED_TOKENS


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
