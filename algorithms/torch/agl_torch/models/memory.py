"""What fits into a device's memory: the defaults of an engine's limits."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

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
    """What a training pass keeps for the backward pass, per token, without logits; measured on a few tokens.

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
    training = model.training
    model.train()
    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.long, device=device)
            model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
        model.train(training)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights) / _PROBED_TOKENS
