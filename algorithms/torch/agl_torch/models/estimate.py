"""What a run would take: memory by arithmetic, seconds by the speed of one forward pass on this machine."""

from __future__ import annotations

import time
from typing import Any

import torch

from agl_algorithms.interface import Algorithm
from agl_core.types.estimates import Workload
from agl_torch.models.loading import LoadedModel
from agl_torch.models.memory import activation_bytes

PROCESS = 500 * 2**20
"""Bytes of Python, torch and transformers without a model."""
FULL_PRECISION = 4
"""Bytes of a float32: of a gradient, of each of AdamW's two moments, and of the master of a smaller weight."""
LOGITS = 2**28
"""Bytes of the logits that exist at the same time, with copies (`agl_torch.training.batching`)."""
DECODING = 2.5
"""What sampling a token takes against one of a long forward pass, measured on a CPU with 64 rows of a 135M model."""
BACKWARD = 2.0
"""What a backward pass takes against its forward pass."""
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
    rollouts = work.groups * work.group_size
    once = algorithm.epochs == 1 and algorithm.minibatches == 1
    passes = (1 + BACKWARD) * algorithm.epochs + algorithm.needs_reference + (not once)
    if algorithm.needs_critic:
        passes += 1 + (1 + BACKWARD) * int(getattr(algorithm, "critic_epochs", 1))
    sampled = (rollouts * work.steps + work.evaluated) * work.response_tokens * DECODING
    prompts = work.groups * work.steps * work.prompt_tokens
    read = prompts + work.evaluated * work.prompt_tokens
    learned = (prompts + rollouts * work.steps * work.response_tokens) * passes
    trained = sum(weight.numel() for weight in loaded.model.parameters() if weight.requires_grad)
    steps = work.steps * algorithm.epochs * algorithm.minibatches
    return float(token * (sampled + read + learned) + STEP_SECONDS * trained * steps)


@torch.inference_mode()
def token_seconds(model: Any, device: torch.device) -> float:
    """Of one token of a forward pass: the fastest of a few passes, the first of which also allocates."""
    ids = torch.zeros(1, _TIMED_TOKENS, dtype=torch.long, device=device)
    taken = []
    for _ in range(_TIMED_PASSES):
        begun = time.perf_counter()
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return min(taken) / _TIMED_TOKENS
