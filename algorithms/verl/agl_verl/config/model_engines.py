"""veRL's `model_engine`s, which compute and shard training: which keys each has, and what it cannot do. No veRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agl_core.config.policies import OptimizerSection
from agl_core.errors import ConfigError
from agl_core.protocols import PolicySpec
from agl_verl.config.chosen import BuiltAlgorithm
from agl_verl.config.native import NativeOptions
from agl_verl.options import VerlOptions

Settings = Iterator[tuple[str, Any]]
ACTOR, REFERENCE, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"


@dataclass(frozen=True, slots=True)
class Training:
    """What is asked of an engine."""

    options: VerlOptions
    dtype: str
    """float32 or bfloat16."""
    seed: int
    deterministic: bool
    cpu: bool


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """One of veRL's."""

    group: str
    """veRL's name of its configuration."""
    workers: Callable[[Training], Settings]
    """Keys of policy, reference and critic."""
    optimizer: Callable[[OptimizerSection], Mapping[str, Any]]
    """What the optimizer's keys are called where engines differ."""


def engine_of(options: VerlOptions) -> ModelEngine:
    """The one that a run's settings name."""
    return MODEL_ENGINES[options.model_engine]


def check(training: Training, spec: PolicySpec, algorithm: BuiltAlgorithm) -> None:
    """ConfigError for what an engine other than FSDP cannot do."""
    options = training.options
    engine = options.model_engine
    if options.sequence_parallel > 1 and engine == "fsdp" and not packs(options, cpu=training.cpu):
        raise ConfigError(
            "[engine.verl] sequence_parallel: veRL spreads the tokens of a sequence over GPUs only with "
            "flash-attention: set attention to 'auto', or sequence_parallel to 1."
        )
    if engine == "fsdp":
        return
    own_critic = algorithm.needs_critic and not isinstance(algorithm, NativeOptions)
    for wrong, what in (
        (training.cpu, "it needs GPUs"),
        (spec.lora is not None, "agl reads only the LoRA adapters that FSDP writes"),
        (options.attention != "auto", "it chooses its attention by keys of its own, for `overrides`"),
        (own_critic, "its critics start at random, and those of agl's algorithms at zero"),
        (engine == "megatron" and training.dtype == "float32", "it trains in bfloat16 only"),
        (engine == "megatron" and training.deterministic, "veRL cannot make it deterministic"),
    ):
        if wrong:
            raise ConfigError(f"[engine.verl] model_engine '{engine}' does not go with these settings: {what}.")


def packs(options: VerlOptions, *, cpu: bool) -> bool:
    """Whether rows are computed without pads; the attentions that cannot do it get rectangles."""
    return options.attention == "flash_attention_2" or (options.attention == "auto" and not cpu)


def _fsdp(training: Training) -> Settings:
    options = training.options
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[training.dtype]
    yield f"{ACTOR}.fsdp_config.seed", training.seed
    for role, place in ((ACTOR, "fsdp_config"), (REFERENCE, "fsdp_config"), (CRITIC, "fsdp")):
        if role != REFERENCE:
            yield f"{role}.strategy", "fsdp2"
        yield f"{role}.{place}.strategy", "fsdp2"
        yield f"{role}.{place}.model_dtype", "fp32"
        precision = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        yield f"{role}.{place}.mixed_precision", precision
        yield f"{role}.{place}.param_offload", options.offload
        yield f"{role}.{place}.optimizer_offload", options.offload
        yield f"{role}.{place}.use_torch_compile", not training.cpu
        yield f"{role}.{place}.ulysses_sequence_parallel_size", options.sequence_parallel
        if training.deterministic:
            yield f"{role}.{place}.full_determinism", True


def _megatron(training: Training) -> Settings:
    options = training.options
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    yield f"{ACTOR}.megatron.seed", training.seed
    for role in (ACTOR, REFERENCE, CRITIC):
        yield f"{role}.megatron.dtype", training.dtype
        yield f"{role}.megatron.param_offload", options.offload
        yield f"{role}.megatron.optimizer_offload", options.offload
        yield f"{role}.megatron.context_parallel_size", options.sequence_parallel
        if options.gradient_checkpointing and role != REFERENCE:
            for name, value in recomputed.items():
                yield f"{role}.megatron.override_transformer_config.{name}", value


def _veomni(training: Training) -> Settings:
    options = training.options
    yield f"{ACTOR}.veomni.seed", training.seed
    for role in (ACTOR, REFERENCE, CRITIC):
        yield f"{role}.veomni.mixed_precision", training.dtype == "bfloat16"
        yield f"{role}.veomni.param_offload", options.offload
        yield f"{role}.veomni.optimizer_offload", options.offload
        yield f"{role}.veomni.ulysses_parallel_size", options.sequence_parallel
        if training.deterministic:
            yield f"{role}.veomni.full_determinism", True


def _of_torch(settings: OptimizerSection) -> Mapping[str, Any]:
    return {"lr_scheduler_type": settings.schedule}


def _of_megatron(settings: OptimizerSection) -> Mapping[str, Any]:
    return {"lr_decay_style": settings.schedule}


def _of_veomni(settings: OptimizerSection) -> Mapping[str, Any]:
    return {"lr_scheduler_type": settings.schedule}


MODEL_ENGINES: Mapping[str, ModelEngine] = {
    "fsdp": ModelEngine("dp", _fsdp, _of_torch),
    "megatron": ModelEngine("megatron", _megatron, _of_megatron),
    "veomni": ModelEngine("veomni", _veomni, _of_veomni),
}
"""By agl's name."""
