"""veRL's configuration for a run: which key of agl's becomes which of veRL's, composed by Hydra from veRL's own files.

Imports Hydra, but neither veRL nor torch: veRL's configuration is files, so it can be shown without starting anything.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from agl_core.config.sections import LoraSection, usual_learning_rate
from agl_core.errors import ConfigError, EngineError
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext, PolicySpec
from agl_server.engines.child import build_algorithm
from agl_verl.options import VerlOptions

if TYPE_CHECKING:
    from agl_algorithms.policy_gradient import Algorithm
    from agl_algorithms.ppo import Ppo


@dataclass(frozen=True, slots=True)
class ChosenAlgorithm:
    """An algorithm and its options, in a form that crosses to other processes."""

    name: str
    options: bytes
    """JSON."""
    plugin_files: tuple[Path, ...] = ()
    """The user's own, which every node finds at the same path."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], plugin_files: tuple[Path, ...] = ()) -> ChosenAlgorithm:
        return cls(name, orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS), plugin_files)

    @classmethod
    def of_policies(cls, context: EngineContext) -> dict[str, ChosenAlgorithm]:
        """By policy, what trains it."""
        files = context.plugin_files
        return {name: cls.of(spec.algorithm, spec.algorithm_options, files) for name, spec in context.policies.items()}

    @classmethod
    def of_run(cls, context: EngineContext) -> ChosenAlgorithm:
        """The algorithm that veRL is started for: that of the first policy with a critic, else of the first policy."""
        chosen = list(cls.of_policies(context).values())
        return max(chosen, key=lambda one: one.build().needs_critic)

    def build(self) -> Algorithm:
        """The algorithm; made once in each process."""
        return _build(self)


@lru_cache(maxsize=8)
def _build(chosen: ChosenAlgorithm) -> Algorithm:
    plugins = Plugins.load(chosen.plugin_files)
    algorithm: Algorithm = build_algorithm(plugins, chosen.name, orjson.loads(chosen.options))
    return algorithm


SHARED, SEPARATE = "agl", "agl_separate"
"""agl's trainers in veRL's registry (`agl_verl.trainer`): by where serving is."""

ENGINE = "model_engine"
ACTOR, REFERENCE, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "model", "rollout"))
CRITIC = "critic"

UNREAD = {
    ACTOR: "profiler rollout_n loss_ data_loader_seed checkpoint.async_save checkpoint.strict calculate_ kl_loss_type "
    "tau_ use_prefix_ freeze_vision_ qat",
    REFERENCE: "profiler rollout_n",
    CRITIC: "profiler rollout_n loss_ data_loader_seed checkpoint.async_save checkpoint.strict shuffle forward_",
    ROLLOUT: "profiler do_sample ignore_eos multi_stage_ over_sample_ prompt_length router_ skip_tokenizer_ trace",
}
"""Beginnings of keys that only veRL's own loop, losses or clients read, which do not run here."""

DECIDED = {
    "[tasks] and [train]": ("data",),
    "[rewards]": ("reward", "custom_reward_function"),
    "[engine.verl] address, nodes and gpus_per_node": ("ray_kwargs", "trainer.nnodes", "trainer.n_gpus_per_node"),
    "[engine.verl] serving_gpus and tensor_parallel": (
        "actor_rollout_ref.hybrid_engine",
        f"{ROLLOUT}.nnodes",
        f"{ROLLOUT}.n_gpus_per_node",
    ),
    "[algorithm] epochs": (f"{ACTOR}.ppo_epochs",),
    "[algorithm] minibatches": (f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.shuffle", "critic.ppo_mini_batch_size"),
    "[algorithm]": ("algorithm", f"{ACTOR}.policy_loss", "critic.cliprange_value"),
    "[algorithm] clip and clip_high": (f"{ACTOR}.clip_ratio",),
    "[algorithm] aggregation": (f"{ACTOR}.loss_agg_mode",),
    "[algorithm] beta": (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
    "[algorithm] entropy": (f"{ACTOR}.entropy_coeff",),
    "[algorithm.ppo] critic_epochs": ("critic.ppo_epochs",),
    "[policies.NAME.optimizer] schedule and warmup_steps": tuple(
        f"{role}.optim.{key}"
        for role in (ACTOR, "critic")
        for key in ("lr_", "min_lr_ratio", "num_cycles", "total_", "zero_indexed_step")
    ),
    "[policies.NAME.optimizer] learning_rate": (f"{ACTOR}.optim.lr",),
    "[algorithm.ppo] critic_learning_rate": ("critic.optim.lr",),
    "[algorithm] name": ("critic.enable",),
    "[policies.NAME.model.lora]": (f"{MODEL}.lora", f"{MODEL}.target_", "critic.model.lora", "critic.model.target_"),
    "[sampling]": (f"{ROLLOUT}.temperature", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"),
    "[agent]": (f"{ROLLOUT}.agent", f"{ROLLOUT}.multi_turn"),
    "nothing: agl's gateway needs vLLM's servers": (f"{ROLLOUT}.name",),
    "[train] group_size": (f"{ROLLOUT}.n",),
    "[train] steps": ("trainer.total_",),
    "[train] checkpoint_every": ("trainer.save_freq",),
    "[eval]": (f"{ROLLOUT}.val_kwargs", "trainer.test_freq", "trainer.val"),
    "agl train --resume": ("trainer.resume_",),
    "`runs`": ("trainer.default_local_dir",),
    "[trackers]": ("trainer.logger",),
    "nothing: agl's own trainer drives veRL ([async] max_staleness is the bound on staleness)": ("trainer.v1",),
    "nothing: transitions go through it": ("transfer_queue.enable",),
    "nothing: agl has no teacher": ("distillation",),
    "nothing: no part of veRL that agl runs reads it": (
        *("trainer", "global_profiler", "reward_model", "sandbox_fusion", "skip", "actor_rollout_ref.nccl_timeout"),
        *(f"{part}.{key}" for part, keys in UNREAD.items() for key in keys.split()),
    ),
}
"""agl's setting that decides the keys of veRL that begin like this; the first that fits counts."""

LONGEST = 2**20
"""Tokens of a response that vLLM allows by itself: the limit is agl's, [sampling] max_tokens or the agent's own."""
FUSED = ("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose logits are hidden states times `lm_head.weight`, as veRL's fused kernels compute them."""
VALUE_LAYER = "score"
"""The last layer of a critic. It starts at zero (`agl_verl.verl_plugin`): frozen, it would remain there."""


def gpus(options: VerlOptions) -> int:
    """How many GPUs a run takes; on a CPU, processes that compute."""
    return options.nodes * options.gpus_per_node + options.serving_gpus


def lacking(options: VerlOptions, gpus_of_nodes: Sequence[int]) -> str | None:
    """Say what nodes with so many GPUs each lack for a run; None if nothing can be known beforehand.

    >>> lacking(VerlOptions(gpus_per_node=2, serving_gpus=2, tensor_parallel=2), [3])
    '3 GPUs, but engine.verl asks for 1 nodes x 2 (gpus_per_node) + 1 replicas x 2 (tensor_parallel)'
    """
    replicas = options.serving_gpus // options.tensor_parallel

    def places(gpus_together: int) -> int:
        return sum(gpus_of_node // gpus_together for gpus_of_node in gpus_of_nodes)

    # A node's GPUs for training, and those of a replica, are of one node.
    fit = places(options.gpus_per_node) >= options.nodes and places(options.tensor_parallel) >= replicas
    if fit and sum(gpus_of_nodes) >= gpus(options):
        return None
    serving = f" + {replicas} replicas x {options.tensor_parallel} (tensor_parallel)" if replicas else ""
    has = " + ".join(map(str, gpus_of_nodes)) or "0"
    training = f"{options.nodes} nodes x {options.gpus_per_node} (gpus_per_node)"
    return f"{has} GPUs, but engine.verl asks for {training}{serving}"


def model_engine(options: VerlOptions) -> str:
    """veRL's name of what shards and computes training: FSDP2 ("dp"), unless an override names another."""
    named = [value for key, _, value in (override.partition("=") for override in options.overrides) if key == ENGINE]
    return named[-1].strip() if named else "dp"


def packs(options: VerlOptions, *, cpu: bool) -> bool:
    """True if rows are computed without pads; the attentions that cannot do it get rectangles."""
    return options.attention == "flash_attention_2" or (options.attention == "auto" and not cpu)


def _check_engine(options: VerlOptions, context: EngineContext, algorithm: Algorithm, cpu: bool) -> None:
    """ConfigError for settings that the model engine does not go with."""
    spec = next(iter(context.policies.values()))
    engine = model_engine(options)
    if engine == "dp":
        if options.sequence_parallel > 1 and not packs(options, cpu=cpu):
            raise ConfigError(
                "[engine.verl] sequence_parallel: veRL spreads the tokens of a sequence over GPUs only with "
                "flash-attention: set attention to 'auto', or sequence_parallel to 1."
            )
        return
    for wrong, what in (
        (cpu, "it needs GPUs"),
        (options.offload or options.sequence_parallel > 1, "offload and sequence_parallel are FSDP's"),
        (options.attention != "auto", "it chooses its attention by keys of its own"),
        (spec.lora is not None, "agl reads only the LoRA adapters that FSDP writes"),
        (algorithm.needs_critic, "its critics start at random, and agl's at zero"),
        (context.deterministic, "agl can make FSDP alone deterministic"),
    ):
        if wrong:
            raise ConfigError(f"[engine.verl] overrides: {ENGINE}={engine} does not go with these settings: {what}.")


def mapped(options: VerlOptions, context: EngineContext, algorithm: Algorithm, cpu: bool) -> dict[str, Any]:
    """agl's settings as veRL's keys, with `++` before those that veRL's files may lack, and values."""
    _check_engine(options, context, algorithm, cpu)
    spec = next(iter(context.policies.values()))
    dtype = ("float32" if cpu else "bfloat16") if spec.dtype == "auto" else spec.dtype
    settings: dict[str, Any] = {
        f"{ACTOR}.use_torch_compile": not cpu,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{REFERENCE}.log_prob_max_token_len_per_gpu": options.tokens_per_micro_batch,
        f"{ACTOR}.ppo_mini_batch_size": 1,
        f"{ACTOR}.use_kl_loss": algorithm.needs_reference,
        f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{ACTOR}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        "critic.enable": algorithm.needs_critic,
        "critic.ppo_mini_batch_size": 1,
        "critic.ppo_max_token_len_per_gpu": options.tokens_per_micro_batch,
        "++critic.ppo_infer_max_token_len_per_gpu": options.tokens_per_micro_batch,  # What veRL goes by, training too.
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.dtype": dtype,
        f"{ROLLOUT}.load_format": "auto",
        f"{ROLLOUT}.tensor_model_parallel_size": options.tensor_parallel,
        f"{ROLLOUT}.gpu_memory_utilization": options.serving_memory,
        f"{ROLLOUT}.max_num_seqs": options.max_rows,
        f"{ROLLOUT}.max_model_len": options.max_context,
        f"{ROLLOUT}.response_length": LONGEST,
        f"{ROLLOUT}.disable_log_stats": False,
        f"{ROLLOUT}.seed": context.seed,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"++{ROLLOUT}.engine_kwargs.vllm.served_model_name": list(context.policies),
        f"++{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": f"agl_verl.servers.{'Cpu' * cpu}WorkerExtension",
        "algorithm.adv_estimator": "grpo",  # One that asks for no critic; agl's own is computed instead.
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
    }
    attention, config = "sdpa" if cpu and options.attention == "auto" else options.attention, _model_config(spec)
    if attention == "sdpa" and config.get("attn_logit_softcapping"):
        attention = "eager"  # torch's own attention caps no scores, and says nothing.
    noise = [name for name, value in config.items() if re.search("drop|jitter", name) and isinstance(value, float)]
    for model in (MODEL, "critic.model"):
        settings[f"{model}.path"] = spec.model
        settings[f"{model}.trust_remote_code"] = spec.trust_remote_code
        settings[f"{model}.use_remove_padding"] = packs(options, cpu=cpu)
        settings[f"{model}.enable_gradient_checkpointing"] = options.gradient_checkpointing
        settings |= {f"++{model}.override_config.{name}": 0.0 for name in noise if config[name]}
        if attention != "auto":
            settings[f"++{model}.override_config.attn_implementation"] = attention
    if model_engine(options) == "dp":
        settings |= _fsdp(options, context, spec, dtype, cpu)
    for role, optimizer in optimizers(options, spec, algorithm).items():
        settings |= {f"{role}.optim.{name}": value for name, value in optimizer.items()}
        settings[f"{role}.optim.total_training_steps"] = settings["trainer.total_training_steps"]
    if context.deterministic:
        if cpu:
            raise ConfigError(
                "[train] deterministic: on a CPU vLLM's replies depend on what else it decodes. Set it to false, or "
                "use a GPU or the torch engine."
            )
        settings[f"{ROLLOUT}.full_determinism"] = True
    if spec.lora is not None:
        settings |= _lora(spec.lora, len(context.policies))
    if options.serving_gpus:  # Servers on GPUs of their own, each replica on one node; they get every update's weights.
        settings |= {
            "actor_rollout_ref.hybrid_engine": False,
            f"{ROLLOUT}.nnodes": options.serving_gpus // options.tensor_parallel,
            f"{ROLLOUT}.n_gpus_per_node": options.tensor_parallel,
            f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "data.train_batch_size": 1,  # veRL wants that many times the mini-batch; batches are agl's.
        }
    if cpu:
        settings |= {
            f"{ROLLOUT}.enforce_eager": True,
            # vLLM 0.31's core dies of a prompt in parts if the request has a seed, as all here have.
            f"{ROLLOUT}.enable_chunked_prefill": False,
            f"{ROLLOUT}.free_cache_engine": False,
            f"++{ROLLOUT}.enable_sleep_mode": False,
            f"++{ROLLOUT}.engine_kwargs.vllm.compilation_config.cudagraph_mode": "NONE",
            f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        }
    return settings


def _model_config(spec: PolicySpec) -> Mapping[str, Any]:
    """The model's own configuration; empty if it cannot be read, which the start says."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError):
        return {}
    return dict(config.to_dict())


def _can_fuse(spec: PolicySpec) -> bool:
    """True if veRL's fused kernels are exact for the model: it is of `FUSED`, and its output layer has no adapter."""
    adapted = () if spec.lora is None else spec.lora.targets
    has_own_layer = not spec.trust_remote_code and "lm_head" not in adapted
    return has_own_layer and _model_config(spec).get("model_type") in FUSED


def _fsdp(options: VerlOptions, context: EngineContext, spec: PolicySpec, dtype: str, cpu: bool) -> dict[str, Any]:
    """How policy, reference and critic are sharded and computed: alike."""
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    shared: dict[str, Any] = {
        "strategy": "fsdp2",
        "model_dtype": "fp32",
        "mixed_precision.param_dtype": precision,
        "mixed_precision.reduce_dtype": "fp32",
        "mixed_precision.buffer_dtype": "fp32",
        "param_offload": options.offload,
        "optimizer_offload": options.offload,
        "use_torch_compile": not cpu,
        "ulysses_sequence_parallel_size": options.sequence_parallel,
        "entropy_from_logits_with_chunking": True,
    }
    if context.deterministic:
        shared["full_determinism"] = True
    return {
        **{
            f"++{place}.{name}": value
            for place in (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp")
            for name, value in shared.items()
        },
        f"{ACTOR}.fsdp_config.seed": context.seed,
        f"{MODEL}.use_fused_kernels": _can_fuse(spec),
        f"{ACTOR}.strategy": "fsdp2",
        "critic.strategy": "fsdp2",
    }


def optimizers(options: VerlOptions, spec: PolicySpec, algorithm: Algorithm) -> dict[str, dict[str, Any]]:
    """veRL's settings of a policy's optimizer and, if there is one, its critic's."""
    optimizer = spec.optimizer
    schedule = "lr_decay_style" if model_engine(options) == "megatron" else "lr_scheduler_type"
    fsdp = model_engine(options) == "dp"  # Counts optimizer steps (`agl_verl.verl_plugin`); the others updates.
    per_update = 1 if fsdp else algorithm.epochs * algorithm.minibatches
    shared = {
        schedule: optimizer.schedule,
        "lr_warmup_steps": -(-optimizer.warmup_steps // per_update),
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.max_grad_norm,
    }
    rates = {ACTOR: optimizer.learning_rate or usual_learning_rate(None, adapter=spec.lora is not None)}
    if algorithm.needs_critic:
        rates[CRITIC] = cast("Ppo", algorithm).critic_learning_rate
    return {role: {"lr": rate, **shared} for role, rate in rates.items()}


def _lora(lora: LoraSection, policies: int) -> dict[str, Any]:
    """So many adapters, which vLLM puts on requests that name them (`agl_verl.servers`)."""
    if not lora.alpha.is_integer():
        raise ConfigError(
            f"veRL's LoRA adapters have a whole number as alpha, not {lora.alpha:g}: change [policies.NAME.model.lora] "
            f"alpha."
        )
    settings: dict[str, Any] = {
        f"++{ROLLOUT}.engine_kwargs.vllm.max_cpu_loras": policies,
        f"++{ACTOR}.checkpoint.save_lora_only": True,  # Every policy has shards, and the base is where it was.
        "++critic.checkpoint.save_lora_only": True,
    }
    for model, targets in ((MODEL, lora.targets), ("critic.model", (*lora.targets, VALUE_LAYER))):
        settings[f"{model}.lora_rank"] = lora.rank
        settings[f"{model}.lora_alpha"] = int(lora.alpha)
        settings[f"{model}.target_modules"] = list(targets)
    return settings


def refuse_decided(override: str) -> None:
    """ConfigError for an override of something that agl decides."""
    key = override.lstrip("+~").partition("=")[0].strip()
    if "=" not in override and not override.startswith("~"):
        raise ConfigError(f"[engine.verl] overrides: '{override}' is not KEY=VALUE.")
    for where, decided in DECIDED.items():
        if key.startswith(decided):
            raise ConfigError(f"[engine.verl] overrides: '{key}' is agl's to decide, by {where}.")


def overrides(options: VerlOptions, context: EngineContext, *, algorithm: Algorithm, cpu: bool) -> list[str]:
    """The run's overrides, as on veRL's command line: agl's settings, then the user's own."""
    for override in options.overrides:
        refuse_decided(override)
    settings = mapped(options, context, algorithm, cpu)
    return [*(f"{key}={orjson.dumps(value).decode()}" for key, value in settings.items()), *options.overrides]


def compose(options: VerlOptions, context: EngineContext, *, algorithm: Algorithm, cpu: bool) -> DictConfig:
    """veRL's whole configuration for a run. ConfigError if an override means nothing to veRL, or is agl's to decide."""
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
    """The folder of veRL's own configuration."""
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise EngineError(
            "veRL is not installed, which engine.name = 'verl' needs: pip install 'agl-verl[gpu]', or 'agl-verl[cpu]' "
            "on a machine without a GPU."
        )
    return Path(verl.origin).parent / "trainer" / "config"
