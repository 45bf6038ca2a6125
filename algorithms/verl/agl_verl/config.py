"""veRL's configuration for a run: which key of agl's becomes which of veRL's, composed by Hydra from veRL's own files.

Imports Hydra, but neither veRL nor torch: veRL's configuration is files, so it can be shown without starting anything.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import orjson
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from agl_core.config.sections import LoraSection, OptimizerSection, usual_learning_rate
from agl_core.errors import ConfigError, EngineError
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext
from agl_core.training.child import find_algorithm
from agl_verl.environment import CPU_WORKER_EXTENSION
from agl_verl.plugin import NativeOptions, VerlOptions

if TYPE_CHECKING:
    from agl_algorithms.policy_gradient import PolicyGradient
    from agl_algorithms.ppo import Ppo

BuiltAlgorithm: TypeAlias = "PolicyGradient | NativeOptions"
"""What can be asked for epochs, minibatches, and whether it needs a critic and a reference."""


@dataclass(frozen=True, slots=True)
class ChosenAlgorithm:
    """A plugin's algorithm and its options, in a form that crosses to other processes."""

    name: str
    options: bytes
    """JSON."""
    plugin_files: tuple[Path, ...]
    """The user's own, which every node finds at the same path."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], plugin_files: tuple[Path, ...] = ()) -> ChosenAlgorithm:
        return cls(name, orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS), plugin_files)

    def build(self) -> PolicyGradient:
        """The algorithm; made once in each process."""
        return _build(self)


@lru_cache(maxsize=8)
def _build(chosen: ChosenAlgorithm) -> PolicyGradient:
    plugins = Plugins.load(chosen.plugin_files)
    component, options = find_algorithm(plugins, chosen.name, orjson.loads(chosen.options))
    algorithm: PolicyGradient = component.build(options)
    return algorithm


def choose(context: EngineContext) -> ChosenAlgorithm | NativeOptions:
    """What the run's one policy is trained with."""
    (spec,) = context.policies.values()
    _, options = find_algorithm(Plugins.load(context.plugin_files), spec.algorithm, spec.algorithm_options)
    if isinstance(options, NativeOptions):
        return options
    return ChosenAlgorithm.of(spec.algorithm, spec.algorithm_options, context.plugin_files)


def built(chosen: ChosenAlgorithm | NativeOptions) -> BuiltAlgorithm:
    """What veRL is configured for."""
    return chosen.build() if isinstance(chosen, ChosenAlgorithm) else chosen


SHARED, SEPARATE = "agl", "agl_separate"
"""agl's trainers in veRL's registry (`agl_verl.trainer`): by where serving is."""

DECIDED = {
    "data": "[tasks] and [train]",
    "actor_rollout_ref.hybrid_engine": "[engine.verl] serving_gpus",
    "reward": "[rewards]",
    "reward_model": "[rewards]",
    "custom_reward_function": "[rewards]",
    "actor_rollout_ref.actor.ppo_epochs": "[algorithm] epochs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "[algorithm] minibatches",
    "actor_rollout_ref.actor.shuffle": "[algorithm] minibatches",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "[algorithm.verl] loss",
    "algorithm.adv_estimator": "[algorithm.verl] estimator",
    "actor_rollout_ref.actor.optim.lr": "[policies.NAME.optimizer] learning_rate",
    "actor_rollout_ref.model.lora": "[policies.NAME.model.lora]",
    "actor_rollout_ref.model.lora_rank": "[policies.NAME.model.lora] rank",
    "actor_rollout_ref.model.lora_alpha": "[policies.NAME.model.lora] alpha",
    "actor_rollout_ref.model.target_modules": "[policies.NAME.model.lora] targets",
    "actor_rollout_ref.rollout.n": "[train] group_size",
    "actor_rollout_ref.rollout.nnodes": "[engine.verl] serving_gpus",
    "actor_rollout_ref.rollout.n_gpus_per_node": "[engine.verl] serving_gpus and tensor_parallel",
    "actor_rollout_ref.rollout.temperature": "[sampling] temperature",
    "actor_rollout_ref.rollout.top_p": "[sampling]",
    "actor_rollout_ref.rollout.top_k": "[sampling]",
    "actor_rollout_ref.rollout.val_kwargs": "[eval]",
    "actor_rollout_ref.rollout.agent": "[agent]",
    "actor_rollout_ref.rollout.multi_turn": "[agent]",
    "actor_rollout_ref.rollout.name": "nothing: agl's gateway needs vLLM's servers",
    "critic.ppo_epochs": "[algorithm.ppo] critic_epochs",
    "critic.ppo_mini_batch_size": "[algorithm.ppo] minibatches",
    "critic.optim.lr": "[algorithm.ppo] critic_learning_rate",
    "critic.enable": "algorithm.name",
    "trainer.nnodes": "[engine.verl] nodes",
    "trainer.n_gpus_per_node": "[engine.verl] gpus_per_node",
    "trainer.total_epochs": "[train] steps",
    "trainer.total_training_steps": "[train] steps",
    "trainer.save_freq": "[train] checkpoint_every",
    "trainer.test_freq": "[eval] every",
    "trainer.val_before_train": "[eval]",
    "trainer.val_only": "agl eval",
    "trainer.resume_mode": "agl train --resume",
    "trainer.resume_from_path": "agl train --resume",
    "trainer.default_local_dir": "`runs`",
    "trainer.logger": "[trackers]",
    "trainer.v1": "nothing: agl's own trainer drives veRL ([async] max_staleness is the bound on staleness)",
    "transfer_queue.enable": "nothing: transitions go through it",
    "ray_kwargs": "[engine.verl] address, nodes and gpus_per_node",
    "distillation": "nothing: agl has no teacher",
}
"""Keys of veRL, each with all below it, that agl decides; and where."""
DECIDED_OF_ALGORITHMS = {
    "algorithm": "[algorithm]",
    "actor_rollout_ref.actor.clip_ratio": "[algorithm] clip and clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "[algorithm] clip",
    "actor_rollout_ref.actor.clip_ratio_high": "[algorithm] clip_high",
    "actor_rollout_ref.actor.loss_agg_mode": "[algorithm] aggregation",
    "actor_rollout_ref.actor.use_kl_loss": "[algorithm] beta",
    "actor_rollout_ref.actor.kl_loss_coef": "[algorithm] beta",
    "actor_rollout_ref.actor.entropy_coeff": "nothing: agl's losses have no entropy term",
    "critic.cliprange_value": "[algorithm.ppo] value_clip",
}
"""The same, where the algorithm is agl's: of veRL's own these are `overrides`."""

LONGEST = 2**20
"""Tokens of a response that vLLM allows by itself: the limit is agl's, [sampling] max_tokens or the agent's own."""
VALUE_LAYER = "score"
"""The last layer of a critic. It starts at zero (`agl_verl.losses`): frozen, it would remain there."""
ENGINE = "model_engine"
_A = "actor_rollout_ref"


def gpus(options: VerlOptions) -> int:
    """How many GPUs a run takes; on a CPU, processes that compute."""
    return options.nodes * options.gpus_per_node + options.serving_gpus


def lacking(options: VerlOptions, gpus_of_nodes: Sequence[int]) -> str | None:
    """What nodes with so many GPUs each lack for a run, in words; None if nothing can be known beforehand.

    >>> lacking(VerlOptions(gpus_per_node=2, serving_gpus=2, tensor_parallel=2), [3])
    '3 GPUs, but engine.verl asks for 1 nodes x 2 (gpus_per_node) + 1 replicas x 2 (tensor_parallel)'
    """
    nodes, each, replicas = options.nodes, options.gpus_per_node, options.serving_gpus // options.tensor_parallel
    # A node's GPUs for training, and those of a replica, are of one node.
    enough = sum(gpus_of_nodes) >= gpus(options) and sum(n // each for n in gpus_of_nodes) >= nodes
    if enough and sum(n // options.tensor_parallel for n in gpus_of_nodes) >= replicas:
        return None
    serving = f" + {replicas} replicas x {options.tensor_parallel} (tensor_parallel)" if replicas else ""
    has = " + ".join(map(str, gpus_of_nodes)) or "0"
    return f"{has} GPUs, but engine.verl asks for {nodes} nodes x {each} (gpus_per_node){serving}"


def model_engine(options: VerlOptions) -> str:
    """veRL's name of what shards and computes training: FSDP2 ("dp"), unless an override names another."""
    named = [value for key, _, value in (override.partition("=") for override in options.overrides) if key == ENGINE]
    return named[-1].strip() if named else "dp"


def packs(options: VerlOptions, *, cpu: bool) -> bool:
    """Whether rows are computed without pads; the attentions that cannot do it get rectangles."""
    return options.attention == "flash_attention_2" or (options.attention == "auto" and not cpu)


def _check_engine(options: VerlOptions, context: EngineContext, algorithm: BuiltAlgorithm, cpu: bool) -> None:
    """ConfigError for settings that the model engine does not go with."""
    (spec,) = context.policies.values()
    engine = model_engine(options)
    if engine == "dp":
        if options.sequence_parallel > 1 and not packs(options, cpu=cpu):
            raise ConfigError(
                "[engine.verl] sequence_parallel: veRL spreads the tokens of a sequence over GPUs only with "
                "flash-attention: set attention to 'auto', or sequence_parallel to 1."
            )
        return
    own_critic = algorithm.needs_critic and not isinstance(algorithm, NativeOptions)
    for wrong, what in (
        (cpu, "it needs GPUs"),
        (options.offload or options.sequence_parallel > 1, "offload and sequence_parallel are FSDP's"),
        (options.attention != "auto", "it chooses its attention by keys of its own"),
        (spec.lora is not None, "agl reads only the LoRA adapters that FSDP writes"),
        (own_critic, "its critics start at random, and those of agl's algorithms at zero"),
        (context.deterministic, "agl can make FSDP alone deterministic"),
    ):
        if wrong:
            raise ConfigError(f"[engine.verl] overrides: {ENGINE}={engine} does not go with these settings: {what}.")


def _fsdp(options: VerlOptions, context: EngineContext, dtype: str, cpu: bool) -> Iterator[tuple[str, Any]]:
    """How policy, reference and critic are sharded and computed: alike."""
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    for role, place in ((f"{_A}.actor", "fsdp_config"), (f"{_A}.ref", "fsdp_config"), ("critic", "fsdp")):
        yield f"{role}.{place}.strategy", "fsdp2"
        yield f"{role}.{place}.model_dtype", "fp32"
        yield (
            f"{role}.{place}.mixed_precision",
            {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        )
        yield f"{role}.{place}.param_offload", options.offload
        yield f"{role}.{place}.optimizer_offload", options.offload
        yield f"{role}.{place}.use_torch_compile", not cpu
        yield f"{role}.{place}.ulysses_sequence_parallel_size", options.sequence_parallel
        if context.deterministic:
            yield f"{role}.{place}.full_determinism", True
    yield from {
        f"{_A}.actor.fsdp_config.seed": context.seed,
        f"{_A}.actor.strategy": "fsdp2",
        "critic.strategy": "fsdp2",
    }.items()


def mapped(
    options: VerlOptions, context: EngineContext, algorithm: BuiltAlgorithm, cpu: bool
) -> Iterator[tuple[str, Any]]:
    """agl's settings as veRL's keys and values. The algorithm is asked for what it needs, not its options."""
    [(policy, spec)] = context.policies.items()
    dtype = ("float32" if cpu else "bfloat16") if spec.dtype == "auto" else spec.dtype
    attention = "sdpa" if cpu and options.attention == "auto" else options.attention
    packed = packs(options, cpu=cpu)
    _check_engine(options, context, algorithm, cpu)
    if model_engine(options) == "dp":
        yield from _fsdp(options, context, dtype, cpu)
    yield from {
        f"{_A}.model.path": spec.model,
        f"{_A}.model.trust_remote_code": spec.trust_remote_code,
        f"{_A}.model.use_remove_padding": packed,
        f"{_A}.model.enable_gradient_checkpointing": options.gradient_checkpointing,
        f"{_A}.actor.use_torch_compile": not cpu,
        f"{_A}.actor.use_dynamic_bsz": True,
        f"{_A}.actor.ppo_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{_A}.rollout.log_prob_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{_A}.ref.log_prob_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{_A}.actor.ppo_mini_batch_size": 1,
        f"{_A}.actor.calculate_entropy": True,
        f"{_A}.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{_A}.actor.checkpoint.load_contents": ["model", "optimizer", "extra"],
        f"{_A}.rollout.name": "vllm",
        f"{_A}.rollout.dtype": dtype,
        f"{_A}.rollout.load_format": "auto",
        f"{_A}.rollout.tensor_model_parallel_size": options.tensor_parallel,
        f"{_A}.rollout.gpu_memory_utilization": options.serving_memory,
        f"{_A}.rollout.max_num_seqs": options.max_rows,
        f"{_A}.rollout.max_model_len": options.max_context,
        f"{_A}.rollout.response_length": LONGEST,
        f"{_A}.rollout.disable_log_stats": False,
        f"{_A}.rollout.seed": context.seed,
        f"{_A}.rollout.calculate_log_probs": True,
        f"{_A}.rollout.engine_kwargs.vllm.served_model_name": policy,
        f"{_A}.rollout.engine_kwargs.vllm.enable_auto_tool_choice": True,
        f"{_A}.rollout.engine_kwargs.vllm.tool_call_parser": options.tool_parser,
        "critic.model.path": spec.model,
        "critic.model.trust_remote_code": spec.trust_remote_code,
        "critic.model.use_remove_padding": packed,
        "critic.model.enable_gradient_checkpointing": options.gradient_checkpointing,
        "critic.ppo_mini_batch_size": 1,
        "critic.ppo_max_token_len_per_gpu": options.tokens_per_micro_batch,
        "critic.ppo_infer_max_token_len_per_gpu": options.tokens_per_micro_batch,  # What veRL goes by, training too.
        "reward.num_workers": 0,
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1 if cpu else 2 * options.nodes,
        "trainer.v1.trainer_mode": SEPARATE if options.serving_gpus else SHARED,
        "trainer.nnodes": options.nodes,
        "trainer.n_gpus_per_node": options.gpus_per_node,
        "trainer.device": "cpu" if cpu else "cuda",
        "trainer.total_training_steps": max(1, context.steps),
        "trainer.logger": ["console"],
        "trainer.resume_mode": "disable",
    }.items()
    optimizer = OptimizerSection.model_validate(dict(spec.optimizer))
    steps = algorithm.epochs * algorithm.minibatches
    rate = optimizer.learning_rate or usual_learning_rate(None, adapter=spec.lora is not None)
    yield from _optimizer(f"{_A}.actor.optim", options, optimizer, rate, steps)
    if algorithm.needs_critic:
        critic = cast("Ppo | NativeOptions", algorithm)
        yield from _optimizer("critic.optim", options, optimizer, critic.critic_learning_rate, steps)
    yield from _algorithm(algorithm)
    if context.deterministic:
        yield from _deterministic(cpu)
    if spec.lora is not None:
        yield from _lora(LoraSection.model_validate(dict(spec.lora)))
    if options.serving_gpus:
        yield from _separate(options)
    if attention != "auto":
        yield f"{_A}.model.override_config.attn_implementation", attention
        yield "critic.model.override_config.attn_implementation", attention
    if cpu:
        yield from {
            f"{_A}.rollout.enforce_eager": True,
            f"{_A}.rollout.free_cache_engine": False,
            f"{_A}.rollout.enable_sleep_mode": False,
            f"{_A}.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode": "NONE",
            f"{_A}.rollout.engine_kwargs.vllm.worker_extension_cls": CPU_WORKER_EXTENSION,
            f"{_A}.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,
        }.items()


def _optimizer(
    place: str, options: VerlOptions, settings: OptimizerSection, rate: float, steps: int
) -> Iterator[tuple[str, Any]]:
    schedule = "lr_decay_style" if model_engine(options) == "megatron" else "lr_scheduler_type"
    yield from {
        f"{place}.{schedule}": settings.schedule,
        f"{place}.lr": rate,
        f"{place}.lr_warmup_steps": -(-settings.warmup_steps // steps),
        f"{place}.weight_decay": settings.weight_decay,
        f"{place}.clip_grad": settings.max_grad_norm,
    }.items()


def _algorithm(algorithm: BuiltAlgorithm) -> Iterator[tuple[str, Any]]:
    """What veRL is to make ready; of its own algorithms also how they compute."""
    yield "critic.enable", algorithm.needs_critic
    if isinstance(algorithm, NativeOptions):
        yield "algorithm.adv_estimator", algorithm.estimator
        yield f"{_A}.actor.policy_loss.loss_mode", algorithm.loss
    else:
        yield "algorithm.adv_estimator", "grpo"  # One that asks for no critic; agl's own is computed instead.
        yield f"{_A}.actor.use_kl_loss", algorithm.needs_reference


def _deterministic(cpu: bool) -> Iterator[tuple[str, Any]]:
    if cpu:
        raise ConfigError(
            "[train] deterministic: on a CPU vLLM's replies depend on what else it decodes. Set it to false, or use a "
            "GPU or the torch engine."
        )
    yield f"{_A}.rollout.full_determinism", True


def _lora(lora: LoraSection) -> Iterator[tuple[str, Any]]:
    """Weights are served with the adapter merged into them: veRL applies a served adapter to its own requests alone."""
    if not lora.alpha.is_integer():
        raise ConfigError(
            f"veRL's LoRA adapters have a whole number as alpha, not {lora.alpha:g}: change [policies.NAME.model.lora] "
            f"alpha."
        )
    for model, targets in ((f"{_A}.model", lora.targets), ("critic.model", (*lora.targets, VALUE_LAYER))):
        yield f"{model}.lora_rank", lora.rank
        yield f"{model}.lora_alpha", int(lora.alpha)
        yield f"{model}.target_modules", list(targets)
    yield f"{_A}.model.lora.merge", True


def _separate(options: VerlOptions) -> Iterator[tuple[str, Any]]:
    """Servers on GPUs of their own, each replica on one node; they get weights after every update."""
    yield from {
        f"{_A}.hybrid_engine": False,
        f"{_A}.rollout.nnodes": options.serving_gpus // options.tensor_parallel,
        f"{_A}.rollout.n_gpus_per_node": options.tensor_parallel,
        f"{_A}.rollout.checkpoint_engine.backend": "nccl",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "data.train_batch_size": 1,  # veRL wants that many times the mini-batch; batches are agl's.
    }.items()


def refuse_decided(override: str, *, native: bool) -> None:
    """ConfigError for an override of something that agl decides; `native`: the algorithm is veRL's own."""
    key = override.lstrip("+~").partition("=")[0].strip()
    if "=" not in override and not override.startswith("~"):
        raise ConfigError(f"[engine.verl] overrides: '{override}' is not KEY=VALUE.")
    for decided, where in (DECIDED if native else DECIDED | DECIDED_OF_ALGORITHMS).items():
        if key == decided or key.startswith(f"{decided}."):
            raise ConfigError(f"[engine.verl] overrides: '{key}' is agl's to decide, by {where}.")


def overrides(options: VerlOptions, context: EngineContext, *, algorithm: BuiltAlgorithm, cpu: bool) -> list[str]:
    """What a run says to veRL, as on its command line: agl's settings, then the user's own overrides."""
    for override in options.overrides:
        refuse_decided(override, native=isinstance(algorithm, NativeOptions))
    own = mapped(options, context, algorithm, cpu)
    return [*(f"{_new(key)}{key}={_hydra(value)}" for key, value in own), *options.overrides]


def compose(options: VerlOptions, context: EngineContext, *, algorithm: BuiltAlgorithm, cpu: bool) -> DictConfig:
    """veRL's whole configuration for a run.

    ConfigError if an override means nothing to veRL, or is agl's to decide.
    """
    chosen = overrides(options, context, algorithm=algorithm, cpu=cpu)
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        try:
            composed = hydra_compose("ppo_trainer", overrides=chosen)
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ConfigError(
                f"[engine.verl] overrides: one of {', '.join(options.overrides)} means nothing to veRL ({reason}). Its "
                f"documentation lists its keys."
            ) from error
    return composed


def config_folder() -> Path:
    """Where veRL keeps its configuration."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        raise EngineError(
            "veRL is not installed, which engine.name = 'verl' needs: pip install 'agl-verl[gpu]', or 'agl-verl[cpu]' "
            "on a machine without a GPU."
        )
    return Path(found.origin).parent / "trainer" / "config"


_ADDED = (
    ".mixed_precision",
    ".override_config.",
    ".engine_kwargs.vllm.",
    ".enable_sleep_mode",
    ".lr_warmup_steps",
    ".load_contents",
    ".ppo_infer_max_token_len_per_gpu",
)


def _new(key: str) -> str:
    """`++` before a key that veRL's files may lack."""
    return "++" if any(part in key for part in _ADDED) else ""


def _hydra(value: Any) -> str:
    """A value as Hydra's command line has it."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
