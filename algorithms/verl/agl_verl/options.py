"""The veRL engine's settings. Imports neither veRL nor torch, so that a configuration can be checked without them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VerlOptions(BaseModel):
    """Settings of the distributed engine; what veRL can do beyond them is said by `overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = Field(
        None,
        description="The Ray cluster to join: 'auto' on one of its nodes, or HOST:PORT; absent: a local Ray starts.",
    )
    nodes: int = Field(1, ge=1, le=1024, description="Nodes that train, and serve by turns unless `serving_gpus` do.")
    gpus_per_node: int = Field(1, ge=1, le=64, description="GPUs of each of them; on a CPU, worker processes.")
    serving_gpus: int = Field(
        0,
        ge=0,
        le=65536,
        description="GPUs that only serve, beside nodes x gpus_per_node, which then only train: rollouts go on during "
        "updates ([async] max_staleness). 0: training and serving share the GPUs, and take turns.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: GPUs if this node has one or a cluster is joined, otherwise the CPU, for tiny models.",
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that one serving replica spreads its weights over.")
    start_timeout: float = Field(
        3600.0,
        gt=0,
        description="Seconds that Ray, the training workers and vLLM may take until they serve.",
    )
    max_context: int | None = Field(
        None, ge=16, description="Longest prompt and response together, in tokens; absent: the model's own limit."
    )
    max_rows: int = Field(256, ge=1, le=4096, description="Replies decoded at the same time, in each serving replica.")
    serving_memory: float = Field(
        0.5, gt=0, lt=1, description="Share of a GPU's memory that serving takes: weights, and keys and values."
    )
    device_memory: float = Field(
        80.0, gt=0, description="GB of a GPU's memory: what `agl train --dry-run` compares its arithmetic with."
    )
    cache_mib: int = Field(1024, ge=16, description="On a CPU: memory for keys and values of a replica, in MiB.")
    tokens_per_micro_batch: int = Field(
        16384,
        ge=1,
        description="Tokens of one training pass on one GPU; no transition may be longer. Fewer take less memory.",
    )
    tokens_per_scoring_pass: int | None = Field(
        None,
        ge=1,
        description="The same of a pass without gradients, for the log-probabilities of policy and reference, which "
        "takes less memory; absent: as many.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs that training spreads each transition's tokens over, which may then have as many times "
        "`tokens_per_micro_batch`.",
    )
    offload: bool = Field(
        False, description="Keep weights and optimizer state in the nodes' memory while they are not in use."
    )
    gradient_checkpointing: bool = Field(
        True, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto",
        description="How training computes attention. auto: flash_attention_2 on GPUs, where flash-attn has to be "
        "installed, sdpa on a CPU. With sdpa and eager a policy and a reference need no flash-attn, and pads are "
        "computed too.",
    )
    eager_serving: bool = Field(
        False, description="vLLM records no CUDA graphs: it starts sooner and takes less memory, but decodes slower."
    )
    tool_parser: str = Field(
        "hermes",
        description="vLLM's parser of the model's tool calls: its --tool-call-parser, for instance 'llama3_json'.",
    )
    overrides: tuple[str, ...] = Field(
        (),
        description="Hydra overrides of veRL's own configuration, as on veRL's command line: KEY=VALUE, or +KEY=VALUE "
        "for a key that it does not have. What agl decides itself is refused. `model_engine=megatron` and others: see "
        "the README.",
    )

    @model_validator(mode="after")
    def _sequences_fill_the_gpus(self) -> Self:
        if self.nodes * self.gpus_per_node % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel is {self.sequence_parallel}, which does not divide the "
                f"{self.nodes * self.gpus_per_node} GPUs that train (nodes x gpus_per_node)."
            )
        return self

    @model_validator(mode="after")
    def _scoring_takes_what_training_takes(self) -> Self:
        if self.tokens_per_scoring_pass is not None and self.tokens_per_scoring_pass < self.tokens_per_micro_batch:
            raise ValueError(
                f"tokens_per_scoring_pass is {self.tokens_per_scoring_pass}, less than tokens_per_micro_batch "
                f"({self.tokens_per_micro_batch}): a transition that can be trained on could not be scored."
            )
        return self

    @model_validator(mode="after")
    def _replicas_fill_the_gpus(self) -> Self:
        gpus = self.serving_gpus or self.nodes * self.gpus_per_node
        if gpus % self.tensor_parallel:
            where = "serving_gpus" if self.serving_gpus else "nodes x gpus_per_node"
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, which does not divide the {gpus} GPUs ({where}): some "
                f"would serve nothing."
            )
        return self
