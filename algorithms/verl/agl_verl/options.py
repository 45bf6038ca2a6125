"""Settings of the engine `verl`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VerlOptions(BaseModel):
    """Settings of the distributed engine; what veRL can do beyond them is said by `overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    address: str | None = None
    """The Ray cluster to join: 'auto' on one of its nodes, or HOST:PORT; absent: a local Ray starts."""
    nodes: int = Field(1, ge=1, le=1024)
    """Nodes that train, and serve by turns unless `serving_gpus` do."""
    gpus_per_node: int = Field(1, ge=1, le=64)
    """GPUs of each of them; on a CPU, worker processes."""
    serving_gpus: int = Field(0, ge=0, le=65536)
    """GPUs that only serve, beside nodes x gpus_per_node, which then only train: rollouts go on during updates ([async]
    max_staleness). 0: training and serving share the GPUs, and take turns."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if this node has one or a cluster is joined, otherwise the CPU, for tiny models."""
    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs that one serving replica spreads its weights over."""
    max_context: int | None = Field(None, ge=16)
    """Longest prompt and response together, in tokens; absent: the model's own limit."""
    max_rows: int = Field(256, ge=1, le=4096)
    """Replies decoded at the same time, in each serving replica."""
    serving_memory: float = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory that serving takes: weights, and keys and values."""
    cache_mib: int = Field(1024, ge=16)
    """On a CPU: memory for keys and values of a replica, in MiB."""
    tokens_per_micro_batch: int = Field(16384, ge=1)
    """Tokens of one training pass on one GPU; no transition may be longer. Fewer take less memory."""
    sequence_parallel: int = Field(1, ge=1, le=64)
    """GPUs that training spreads each transition's tokens over, which may then have as many times
    `tokens_per_micro_batch`."""
    offload: bool = False
    """Keep weights and optimizer state in the nodes' memory while they are not in use."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """How training computes attention. auto: flash_attention_2 on GPUs, where flash-attn has to be installed, sdpa on a
    CPU. With sdpa and eager a policy and a reference need no flash-attn, and pads are computed too."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides of veRL's own configuration, as on veRL's command line: KEY=VALUE, or +KEY=VALUE for a key that
    it does not have. Keys that agl decides itself are refused. `model_engine=megatron` and others: docs/verl.md."""

    @model_validator(mode="after")
    def _fills_the_gpus(self) -> Self:
        training = (self.nodes * self.gpus_per_node, "nodes x gpus_per_node")
        serving = (self.serving_gpus, "serving_gpus") if self.serving_gpus else training
        for name, (gpus, where) in {"sequence_parallel": training, "tensor_parallel": serving}.items():
            if gpus % getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, which does not divide the {gpus} GPUs ({where}).")
        return self
