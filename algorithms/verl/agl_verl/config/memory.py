"""What a run takes of each GPU's memory, by arithmetic, before anything starts. Plain numbers; no veRL, no torch.

It is an order of magnitude. What is counted is what grows with the model and the settings; CUDA itself, NCCL's buffers
and fragmentation take 2 to 4 GB more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_core.config.policies import LoraSection
from agl_core.protocols import PolicySpec
from agl_verl.config.chosen import BuiltAlgorithm
from agl_verl.options import VerlOptions

GB = 1e9
RESERVE = 4 * GB
"""For what is not counted."""
_STATE, _GRADIENTS, _WEIGHTS = 12, 4, 4
"""Bytes for each trained weight in float32: the weight and Adam's two moments; its gradient; for one that is frozen."""
_LOGITS = 2
"""Copies of a pass's logits in float32 at the same time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's size."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    cached: int
    """Numbers of keys and values that one token has in all layers."""

    @classmethod
    def of(cls, folder: Path) -> Shape | None:
        """Of a model's folder; None if it is not on this machine, or says too little."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            parameters = sum(_parameters(file) for file in folder.glob("*.safetensors"))
            return cls._of(config.get("text_config", config), parameters)
        except (OSError, ValueError, KeyError, struct.error):
            return None

    @classmethod
    def _of(cls, config: Mapping[str, Any], parameters: int) -> Shape | None:
        heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
        dimension = config.get("head_dim") or hidden // heads
        cached = 2 * layers * (config.get("num_key_value_heads") or heads) * dimension
        return cls(parameters, layers, hidden, config["vocab_size"], cached) if parameters else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one GPU, by what takes them."""

    serving: Mapping[str, float]
    """While agents run."""
    training: Mapping[str, float]
    """During an update, in the pass that takes more: one with gradients, or one that only scores."""
    tokens_cached: int
    """Tokens whose keys and values fit into the servers' share, in each replica."""

    @property
    def most(self) -> float:
        """Bytes of the fuller of the two times."""
        return max(sum(self.serving.values()), sum(self.training.values()))

    def lines(self, device_memory: float, max_context: int) -> Iterator[str]:
        """The arithmetic and the verdict; `device_memory` in GB."""
        for when, parts in (("while agents run", self.serving), ("during an update", self.training)):
            whole = " + ".join(f"{each / GB:.1f} {name}" for name, each in parts.items() if each)
            yield f"Memory of a GPU {when}: {whole or 'nothing'} = {sum(parts.values()) / GB:.1f} GB."
        verdict = self.verdict(device_memory, max_context)
        yield f"By this arithmetic it fits into {device_memory:g} GB." if verdict is None else verdict

    def verdict(self, device_memory: float, max_context: int) -> str | None:
        """What does not fit and what helps; None if all does."""
        if self.tokens_cached < max_context:
            return (
                f"It does not fit: the servers' share leaves room for {max(0, self.tokens_cached)} cached tokens, and "
                f"one reply may need {max_context}. Raise serving_memory or tensor_parallel, or lower max_context."
            )
        if (over := self.most + RESERVE - device_memory * GB) <= 0:
            return None
        while_serving = sum(self.serving.values()) >= sum(self.training.values())
        remedy = (
            "Set offload = true, lower serving_memory, or give serving GPUs of its own (serving_gpus)"
            if while_serving
            else "Lower tokens_per_micro_batch and tokens_per_scoring_pass, train an adapter "
            "([policies.NAME.model.lora])"
        )
        return (
            f"It does not fit into {device_memory:g} GB, of which {RESERVE / GB:g} are kept for CUDA and NCCL: "
            f"{over / GB:.1f} GB too much. {remedy}, or use more GPUs."
        )


def described(options: VerlOptions, spec: PolicySpec, algorithm: BuiltAlgorithm) -> Iterator[str]:
    """What a run takes of each GPU's memory, in lines with a verdict."""
    shape = Shape.of(Path(spec.model).expanduser())
    if shape is None:
        yield f"What it takes of a GPU's memory is not known: the weights of '{spec.model}' are not on this machine."
        return
    found = estimate(options, spec, algorithm, shape)
    yield from found.lines(options.device_memory, options.max_context or 1)


def estimate(options: VerlOptions, spec: PolicySpec, algorithm: BuiltAlgorithm, shape: Shape) -> Estimate:
    """For the GPUs that train. The reference is not on them: veRL keeps it in the nodes' memory."""
    gpus = options.nodes * options.gpus_per_node
    trained = _trained(shape, spec)
    state = (_STATE * trained + _WEIGHTS * (shape.parameters - trained if spec.lora else 0)) / gpus
    copies = 2 if algorithm.needs_critic else 1
    bytes_served = 4 if spec.dtype == "float32" else 2
    weights = bytes_served * shape.parameters / options.tensor_parallel
    share = options.serving_memory * options.device_memory * GB
    tokens = options.tokens_per_micro_batch
    # With checkpointing a layer keeps what goes into it; without, about sixteen times as much.
    kept = tokens * shape.hidden * 2 * shape.layers * (1 if options.gradient_checkpointing else 16)
    resident = 0.0 if options.offload or options.serving_gpus else state * copies
    logits = float(shape.vocabulary * 4 * _LOGITS)
    training = {
        "weights and moments": state * copies,
        "gradients": _GRADIENTS * trained / gpus * copies,
        "logits": tokens * logits,
        "activations": float(kept),
    }
    scored = options.tokens_per_scoring_pass or tokens
    scoring = {"weights and moments": state * copies, "logits": scored * logits}
    return Estimate(
        serving={"weights and moments": resident, "servers": 0.0 if options.serving_gpus else share},
        training=max(training, scoring, key=lambda parts: sum(parts.values())),
        tokens_cached=int((share - weights) * options.tensor_parallel / (shape.cached * bytes_served)),
    )


def _trained(shape: Shape, spec: PolicySpec) -> int:
    """All weights, or about those of an adapter: two matrices for each layer that it adapts."""
    if spec.lora is None:
        return shape.parameters
    lora = LoraSection.model_validate(dict(spec.lora))
    return shape.layers * len(lora.targets) * lora.rank * 4 * shape.hidden


def _parameters(file: Path) -> int:
    """How many numbers a safetensors file has, by its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    found = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            found += count
    return found
