"""Which weights an adapter belongs to, and merging it into them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agl_core.errors import EngineError

BASE_FILE = "agl_base.json"
"""Beside an adapter: the fingerprint of the weights that it was trained on."""
_SAMPLED = 1024
"""How many values of each tensor a fingerprint looks at."""


def fingerprint(model: Any) -> str:
    """A digest of a model's weights, without those of an adapter: the shapes, and values from all over each tensor.

    It looks at so few of them that a large model takes no time. They are rounded to bfloat16, so that it makes no
    difference in which dtype the same weights are loaded.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(_of_base(model)):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_base(folder: Path, model: Any) -> None:
    """Say beside a saved adapter which weights it belongs to."""
    (folder / BASE_FILE).write_text(json.dumps({"fingerprint": fingerprint(model)}), encoding="utf-8")


def is_of_other_base(folder: Path, model: Any) -> bool:
    """Whether an adapter was trained on other weights than the model's; False where nothing says on which."""
    try:
        recorded = json.loads((folder / BASE_FILE).read_text(encoding="utf-8")).get("fingerprint")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"{folder / BASE_FILE} cannot be read: {error}. Restore the folder from a copy.") from error
    return bool(recorded != fingerprint(model))


def check_base(folder: Path, model: Any, name: str) -> None:
    """EngineError if an adapter was trained on other weights than the model's; `name` is the model's."""
    if is_of_other_base(folder, model):
        raise EngineError(
            f"The adapter in {folder} was trained on other weights than those of '{name}' now: their fingerprints "
            f"differ. Put the weights back that it was trained on, or name their folder."
        )


def merge(model: Any, tokenizer: Any, folder: Path) -> None:
    """Merge a model's adapter into its weights, which changes them, and write both as transformers loads them."""
    merged = model.merge_and_unload(safe_merge=True)
    merged.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)


def _of_base(model: Any) -> Iterator[tuple[str, Tensor]]:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for name, tensor in base.named_parameters():
        if "lora_" not in name:
            yield name.replace(".base_layer", ""), tensor
