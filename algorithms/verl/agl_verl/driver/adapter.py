"""A LoRA adapter as peft and agl's torch engine read it, from what veRL exports.

veRL writes the weights of peft's whole model under a plain model's file names: no base has the keys.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file

from agl_algorithms.fingerprints import fingerprint_of, write_fingerprint
from agl_core.config.policies import LoraSection
from agl_core.errors import CheckpointError

ADAPTER_NAME = ".default."
"""peft's name of the only adapter, in the keys of a model in memory, but not in those of its files."""
WRAPPED, TIED = "base_model.model.", "lm_head.weight"
"""Before the names of the base's weights, where peft wraps it; and its last layer."""
_OF_THE_BASE = frozenset({"config.json", "generation_config.json", "model.safetensors.index.json"})


def write_adapter(exported: Path, folder: Path, lora: LoraSection, base: str) -> None:
    """Write the adapter that is in `exported` to the new `folder`, with the tokenizer; `base` is its model's name.

    The fingerprint of the base beside it is that of the weights that were trained with it, which are exported too.
    CheckpointError if there is none.
    """
    weights: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[Path, str]] = {}
    for file in sorted(exported.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no dict
                if ".lora_A." in key or ".lora_B." in key:
                    weights[key.replace(ADAPTER_NAME, ".")] = tensors.get_tensor(key).contiguous()
                else:
                    places[key.removeprefix(WRAPPED).replace(".base_layer.", ".")] = (file, key)
    if not weights:
        raise CheckpointError(
            f"veRL wrote no LoRA weights to {exported}. Is its folder on a disk that all nodes share?"
        )
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=list(lora.targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    described = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    if described.get("tie_word_embeddings"):  # One weight by two names, of which a loaded model has the first.
        places.pop(TIED, None)
    write_fingerprint(folder, fingerprint_of(places, lambda name: _tensor(*places[name])))
    for file in exported.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in _OF_THE_BASE:
            shutil.copy(file, folder / file.name)


def _tensor(file: Path, key: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(key)
        return tensor
