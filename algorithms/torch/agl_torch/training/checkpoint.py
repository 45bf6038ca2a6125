"""Writing a policy to a folder and restoring it exactly.

FOLDER/
  model/               Hugging Face format (safetensors) with the tokenizer; of a LoRA policy its adapter (peft), and
                       in agl_base.json which weights it was trained on
  trainer.pt           optimizer, critic, version, random state; read without pickle's arbitrary code
  checkpoint.json      the format's number and what kind of policy it is
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from agl_core.errors import CheckpointError
from agl_torch.models.adapters import is_of_other_base, write_base
from agl_torch.models.loading import LoadedModel
from agl_torch.training.trainer import PolicyTrainer

FORMAT = 1


def save_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Write a policy; `folder` exists whole or not at all, an earlier one is replaced."""
    partial = folder.with_name(f".{folder.name}.partial")
    superseded = folder.with_name(f".{folder.name}.superseded")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, superseded):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        # The embeddings are the base's: to find that out, peft would look for the base, on the hub too.
        of_adapter = {"save_embedding_layers": False} if loaded.has_adapter else {}
        loaded.model.save_pretrained(partial / "model", safe_serialization=True, **of_adapter)
        loaded.tokenizer.save_pretrained(partial / "model")
        if loaded.has_adapter:
            write_base(partial / "model", loaded.model)
        torch.save(trainer.state_dict(), partial / "trainer.pt")
        (partial / "checkpoint.json").write_text(json.dumps({"format": FORMAT, **_kind(loaded)}), encoding="utf-8")
        if folder.exists():
            os.replace(folder, superseded)
        os.replace(partial, folder)
        shutil.rmtree(superseded, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error}. Make room or choose a folder that you may write to."
        ) from error


def load_policy(folder: Path, loaded: LoadedModel, trainer: PolicyTrainer) -> None:
    """Restore what `save_policy` wrote, into the same model object."""
    try:
        described = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of the torch engine: {error}.") from error
    if described.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} has format {described.get('format')}, this version reads {FORMAT}. "
            f"Use the version of agl-torch that wrote it."
        )
    kind = _kind(loaded)
    different = [f"{key} was {described.get(key)}, now {now}" for key, now in kind.items() if described.get(key) != now]
    if different:
        raise CheckpointError(
            f"The checkpoint {folder} belongs to another configuration ({'; '.join(different)}). "
            f"Resume with the model, dtype and lora settings it was saved with."
        )
    if loaded.has_adapter and is_of_other_base(folder / "model", loaded.model):
        raise CheckpointError(
            f"The checkpoint {folder} has an adapter of other weights than those that are loaded now. Resume with the "
            f"weights that the run started from."
        )
    try:
        state = torch.load(folder / "trainer.pt", map_location=loaded.device, weights_only=True)
        _load_weights(folder / "model", loaded)
        trainer.load_state_dict(state)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(
            f"The checkpoint {folder} is damaged or belongs to another model ({reason}). Resume from an earlier one."
        ) from error


def _kind(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "model": loaded.model.config.model_type,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "lora": loaded.has_adapter,
    }


def _load_weights(folder: Path, loaded: LoadedModel) -> None:
    if loaded.has_adapter:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        weights = load_file(folder / "adapter_model.safetensors", device=str(loaded.device))
        result: Any = set_peft_model_state_dict(loaded.model, weights)
        if result.unexpected_keys:
            raise ValueError(f"unknown adapter weights, such as {result.unexpected_keys[0]}")
        return
    saved = type(loaded.model).from_pretrained(folder, dtype=loaded.dtype)
    loaded.model.load_state_dict(saved.state_dict())
