"""Which weights an adapter belongs to, and merging it into them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from agl_algorithms.fingerprints import BASE_FILE, fingerprint_of, write_fingerprint
from agl_core.errors import EngineError


def fingerprint(model: Any) -> str:
    """The fingerprint of a model's weights, without those of an adapter."""
    tensors = dict(_of_base(model))
    return fingerprint_of(tensors, tensors.__getitem__)


def write_base(folder: Path, model: Any) -> None:
    """Say beside a saved adapter which weights it belongs to."""
    write_fingerprint(folder, fingerprint(model))


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
