"""A policy's checkpoint: veRL's shards, and the weights as any other program reads them.

FOLDER/
  model/               Hugging Face format (safetensors) with the tokenizer, as the torch engine writes it; of a LoRA
                       policy its adapter (peft)
  verl/actor, critic   veRL's shards: weights (of a LoRA policy its adapter), optimizer, schedule, random state of every
                       worker; Megatron's weights are in Hugging Face format there too
  checkpoint.json      the format, the version, how many workers wrote the shards, who alone can read them, and whether
                       there is a critic
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agl_core.config.sections import LoraSection
from agl_core.errors import CheckpointError
from agl_core.protocols import PolicySpec

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "verl 1"
ADAPTER_NAME = ".default."
"""peft's name of the only adapter, in the keys of a model in memory, but not in those of its files."""
WRAPPED, TIED = "base_model.model.", "lm_head.weight"
"""Before the names of the base's weights, where peft wraps it; and its last layer."""
_OF_THE_BASE = frozenset({"config.json", "generation_config.json", "model.safetensors.index.json"})


def shards(folder: Path) -> Path:
    """The folder of veRL's own files."""
    return folder / "verl"


def finish(folder: Path, spec: PolicySpec, *, version: int, workers: int, critic: bool) -> None:
    """Put the policy's weights where they are looked for, and say what this is; veRL wrote its files before."""
    from agl_chat.conversation import keep_tokenizer_settings  # It takes seconds.

    actor, model = shards(folder) / "actor", folder / "model"
    exported, read_again = actor / "huggingface", actor / "model" / "huggingface"
    try:
        if read_again.is_dir():
            shutil.rmtree(exported, ignore_errors=True)
            shutil.copytree(read_again, exported)
        if not any(exported.glob("*.safetensors")):
            raise CheckpointError(f"veRL wrote no weights to {exported}. Is its folder on a disk that all nodes share?")
        shutil.rmtree(model, ignore_errors=True)
        if spec.lora is None:
            exported.rename(model)
            # veRL looks for the configuration of the model beside its shards.
            exported.mkdir()
            for file in model.glob("*"):
                if file.suffix != ".safetensors":
                    shutil.copy(file, exported / file.name)
        else:
            write_adapter(exported, model, spec.lora, spec.name or spec.model)
            for file in exported.glob("*.safetensors"):
                file.unlink()
        keep_tokenizer_settings(spec.model, model)
        described = {"version": version, "workers": workers, "critic": critic, "format": FORMAT}
        (folder / "checkpoint.json").write_text(json.dumps(described), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error}. Make room or choose a folder that every node may "
            f"write to."
        ) from error


def read(folder: Path, *, workers: int, critic: bool) -> int:
    """A checkpoint's version; CheckpointError if this engine cannot go on from it."""
    try:
        described = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of the veRL engine: {error}.") from error
    if described.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} was not written by the veRL engine, so its optimizer cannot be restored. To "
            f"start from its weights, name them in a new run: policies.default.model.path = '{folder / 'model'}'."
        )
    if described["workers"] != workers:
        raise CheckpointError(
            f"The checkpoint {folder} has the shards of {described['workers']} workers, and {workers} would read them. "
            f"Resume with as many GPUs, or start a new run from its weights: policies.default.model.path = "
            f"'{folder / 'model'}'."
        )
    if critic and not described["critic"]:
        raise CheckpointError(f"The checkpoint {folder} has no critic. Resume with the algorithm it was written with.")
    return int(described["version"])


def write_adapter(exported: Path, folder: Path, lora: LoraSection, base: str) -> None:
    """Write the adapter that is in `exported` to the new `folder`, with the tokenizer; `base` is its model's name.

    veRL exports the weights of peft's whole model under a plain model's file names: those of the base are for the
    fingerprint. CheckpointError if there is no adapter.
    """
    # veRL reads its environment when it is imported, which these may do: the driver has not set it yet.
    from peft import LoraConfig
    from safetensors import safe_open
    from safetensors.torch import save_file

    from agl_algorithms.fingerprints import fingerprint_of, write_fingerprint

    def tensor_of(name: str) -> Tensor:
        file, key = places[name]
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(key)
            return tensor

    weights: dict[str, Tensor] = {}
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
    write_fingerprint(folder, fingerprint_of(places, tensor_of))
    for file in exported.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in _OF_THE_BASE:
            shutil.copy(file, folder / file.name)
