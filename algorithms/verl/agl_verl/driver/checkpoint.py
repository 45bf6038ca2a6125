"""A policy's checkpoint: veRL's shards, and the weights as any other program reads them.

FOLDER/
  model/               Hugging Face format (safetensors) with the tokenizer, as the torch engine writes it; of a LoRA
                       policy its adapter (peft)
  verl/actor, critic   veRL's shards: weights, optimizer, schedule, random state of every worker; Megatron's weights
                       are in Hugging Face format there too
  checkpoint.json      the format, the version, and how many workers wrote the shards
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agl_core.errors import CheckpointError

FORMAT = "verl 1"


@dataclass(frozen=True, slots=True)
class Described:
    """What a checkpoint says about itself."""

    version: int
    workers: int
    """Shards can be read by as many workers as wrote them."""
    critic: bool
    format: str = FORMAT


def shards(folder: Path) -> Path:
    """Where veRL's own files are."""
    return folder / "verl"


def finish(folder: Path, described: Described, write_adapter: Callable[[Path, Path], None] | None = None) -> None:
    """Put the weights where they are looked for, and say what this is; veRL wrote its files before.

    `write_adapter` makes the folder of a LoRA adapter from what veRL exported (`agl_verl.driver.adapter`).
    """
    actor, model = shards(folder) / "actor", folder / "model"
    exported, read_again = actor / "huggingface", actor / "model" / "huggingface"
    try:
        if read_again.is_dir():
            shutil.rmtree(exported, ignore_errors=True)
            shutil.copytree(read_again, exported)
        if not any(exported.glob("*.safetensors")):
            raise CheckpointError(f"veRL wrote no weights to {exported}. Is its folder on a disk that all nodes share?")
        shutil.rmtree(model, ignore_errors=True)
        if write_adapter is None:
            exported.rename(model)
            # veRL looks for the configuration of the model beside its shards.
            exported.mkdir()
            for file in model.glob("*"):
                if file.suffix != ".safetensors":
                    shutil.copy(file, exported / file.name)
        else:
            write_adapter(exported, model)
            for file in exported.glob("*.safetensors"):
                file.unlink()
        (folder / "checkpoint.json").write_text(json.dumps(asdict(described)), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be written: {error}. Make room or choose a folder that every node may "
            f"write to."
        ) from error


def read(folder: Path, *, workers: int, critic: bool) -> Described:
    """What is in a checkpoint; CheckpointError if this engine cannot go on from it."""
    try:
        content = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of the veRL engine: {error}.") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {folder} was not written by the veRL engine, so its optimizer cannot be restored. To "
            f"start from its weights, name them in a new run: policies.default.model.path = '{folder / 'model'}'."
        )
    described = Described(**content)
    if described.workers != workers:
        raise CheckpointError(
            f"The checkpoint {folder} has the shards of {described.workers} workers, and {workers} would read them. "
            f"Resume with as many GPUs, or start a new run from its weights: policies.default.model.path = "
            f"'{folder / 'model'}'."
        )
    if critic and not described.critic:
        raise CheckpointError(f"The checkpoint {folder} has no critic. Resume with the algorithm it was written with.")
    return described
