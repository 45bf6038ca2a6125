"""Which weights an adapter is trained on, the same for every engine: those that it may adapt, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from agl_core.errors import EngineError

BASE_FILE = "agl_base.json"
"""Beside an adapter: the fingerprint of the weights that it was trained on."""
_SAMPLED = 1024
"""How many values of each tensor a fingerprint looks at."""


def check_targets(model: nn.Module, targets: Iterable[str]) -> None:
    """EngineError if an adapter's targets share their weights with another layer, into which merging would bring it."""
    weights = [*model.named_parameters(remove_duplicate=False)]
    uses = Counter(id(weight) for _, weight in weights)
    tied = [f".{path.rpartition('.')[0]}" for path, weight in weights if uses[id(weight)] > 1]
    refused = [target for target in targets if any(path.endswith(f".{target}") for path in tied)]
    if refused:
        raise EngineError(
            f"lora.targets names {', '.join(refused)}, and the model's output layer and embeddings share their weights "
            f"(tie_word_embeddings): an adapter of one, merged into them, would change the other. Leave it out."
        )


def fingerprint_of(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> str:
    """A digest of a model's weights by name, without those of an adapter: the shapes, and values from all over each.

    Values are rounded to bfloat16, so that the dtype in which the same weights are loaded makes no difference.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        tensor = tensor_of(name)
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_fingerprint(folder: Path, fingerprint: str) -> None:
    """Say beside a saved adapter which weights it belongs to."""
    (folder / BASE_FILE).write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")
