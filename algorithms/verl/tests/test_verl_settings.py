"""agl's settings as veRL's, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from transformers import Gemma2Config, OPTConfig, PretrainedConfig, Qwen2Config

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions, PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.config.load import load
from agl_core.config.sections import OptimizerSection
from agl_core.errors import CapabilityError, ConfigError
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.testing.engines import engine_context
from agl_torch.optimizer import PolicyOptimizer
from agl_verl import config as verl_config
from agl_verl import plugin
from agl_verl.config import ChosenAlgorithm, lacking, refuse_decided
from agl_verl.environment import variables
from agl_verl.options import VerlOptions
from agl_verl.plugin import VerlEngine
from agl_verl.verl_plugin import StepSizes

OPTIMIZER = {"learning_rate": 2e-4, "schedule": "cosine", "warmup_steps": 5}


def context_of(spec: dict[str, Any] | None = None, **changes: Any) -> EngineContext:
    policy = PolicySpec(**{"model": "/models/m", "dtype": "bfloat16", "optimizer": OPTIMIZER, **(spec or {})})
    context = EngineContext(Path("/runs/x"), 3, {"default": policy}, False, (), "k", steps=40)
    return replace(context, **changes)


def mapped(*arguments: Any) -> dict[str, Any]:
    return {key.lstrip("+"): value for key, value in verl_config.mapped(*arguments).items()}


def mapping_of(algorithm: Any = None, *, cpu: bool = False, spec: dict[str, Any] | None = None, **options: Any) -> dict:
    return mapped(VerlOptions(**options), context_of(spec), algorithm or grpo(), cpu)


def grpo(**options: Any) -> Grpo:
    return Grpo(GrpoOptions(**({"beta": 0} | options)))


def configured(folder: Path, *lines: str) -> Path:
    """A run's configuration with these lines more."""
    file = folder / "train.toml"
    own = [
        "config_version = 1",
        f'plugins = ["{plugin.__file__}"]',
        'agent.entry = "agent:solve"',
        'tasks.train = {source = "jsonl", path = "tasks.jsonl"}',
        'policies.default.model.path = "m"',
    ]
    file.write_text("\n".join([*own, *lines]))
    return file


@pytest.mark.parametrize(
    ("engine", "given", "cap"), [("verl", None, 2.0), ("verl", 0, 0.0), ("verl", 3, 3.0), ("torch", None, None)]
)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_importance_weights_are_capped_at_2_unless_the_run_says_otherwise(
    tmp_path: Path, engine: str, given: float | None, cap: float | None, algorithm: str
) -> None:
    setting = [] if given is None else [f"algorithm.{algorithm}.importance_cap = {given}"]
    file = configured(tmp_path, f'engine.name = "{engine}"', f'algorithm.name = "{algorithm}"', *setting)
    assert load(file).policies["default"].algorithm.options.model_dump()["importance_cap"] == cap


def test_a_target_kl_is_refused_by_name(tmp_path: Path) -> None:
    file = configured(tmp_path, "algorithm.grpo = {epochs = 2, target_kl = 0.02}")
    load(file)
    message = r"'grpo' .* needs an update that ends at a target KL, which engine 'verl' .* \(tinker, torch\)"
    with pytest.raises(CapabilityError, match=message):
        load(file, ["engine.name=verl"])


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "nodes": (2, "trainer.nnodes", 2),
    "gpus_per_node": (4, "trainer.n_gpus_per_node", 4),
    "serving_gpus": (4, "actor_rollout_ref.hybrid_engine", False),
    "max_context": (512, "actor_rollout_ref.rollout.max_model_len", 512),
    "max_rows": (7, "actor_rollout_ref.rollout.max_num_seqs", 7),
    "serving_memory": (0.3, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.3),
    "tokens_per_micro_batch": (99, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 99),
    "offload": (True, "actor_rollout_ref.actor.fsdp_config.param_offload", True),
    "gradient_checkpointing": (False, "actor_rollout_ref.model.enable_gradient_checkpointing", False),
    "attention": ("sdpa", "actor_rollout_ref.model.override_config.attn_implementation", "sdpa"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_reaches_verl(name: str) -> None:
    value, key, expected = CHANGES[name]
    before, after = mapping_of(), mapping_of(**{name: value})
    assert after[key] == expected
    assert before.get(key) != expected


def test_every_setting_is_shown_to_have_an_effect() -> None:
    elsewhere = {"address", "device", "tensor_parallel", "cache_mib", "overrides", "sequence_parallel"}
    assert set(VerlOptions.model_fields) == CHANGES.keys() | elsewhere


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus_per_node": 3, "tensor_parallel": 2}, "tensor_parallel is 2, which does not divide the 3 GPUs (nodes x"),
        ({"serving_gpus": 3, "tensor_parallel": 2}, "tensor_parallel is 2, which does not divide the 3 GPUs (serving_"),
        ({"gpus_per_node": 3, "serving_gpus": 2, "sequence_parallel": 2}, "sequence_parallel is 2, which does not"),
    ],
)
def test_what_is_spread_fills_the_gpus(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        VerlOptions(**options)


def test_servers_of_their_own() -> None:
    rollout = "actor_rollout_ref.rollout"
    config = mapping_of(nodes=2, gpus_per_node=8, serving_gpus=8, tensor_parallel=4)
    assert (config["trainer.nnodes"], config["trainer.n_gpus_per_node"]) == (2, 8)
    assert config[f"{rollout}.nnodes"] * config[f"{rollout}.n_gpus_per_node"] == 8
    assert config[f"{rollout}.n_gpus_per_node"] == 4, "each replica on one node"
    assert config[f"{rollout}.tensor_model_parallel_size"] == 4
    assert config[f"{rollout}.checkpoint_engine.backend"] == "nccl"
    batch, exchange = config["data.train_batch_size"], config["trainer.v1.separate_async.parameter_sync_step"]
    assert batch == exchange * config["actor_rollout_ref.actor.ppo_mini_batch_size"], "veRL asserts it"
    assert config["trainer.v1.trainer_mode"] != mapping_of()["trainer.v1.trainer_mode"]
    assert f"{rollout}.checkpoint_engine.backend" not in mapping_of(), "veRL's own, by turns"


@pytest.mark.parametrize(
    ("options", "gpus_of_nodes", "enough"),
    [
        ({"nodes": 2, "gpus_per_node": 8}, [8, 8], True),
        ({"nodes": 2, "gpus_per_node": 8}, [8, 0, 4], False),
        ({"nodes": 1, "gpus_per_node": 16}, [8, 8], False),
        ({"gpus_per_node": 4, "serving_gpus": 4}, [8], True),
        ({"gpus_per_node": 8, "serving_gpus": 1}, [8], False),
        ({"gpus_per_node": 2, "serving_gpus": 8, "tensor_parallel": 8}, [4, 4, 4], False),
        ({"gpus_per_node": 2, "serving_gpus": 8, "tensor_parallel": 4}, [4, 4, 4], True),
    ],
)
def test_what_a_cluster_lacks_is_told_before_anything_waits_for_it(
    options: dict[str, Any], gpus_of_nodes: list[int], enough: bool
) -> None:
    assert (lacking(VerlOptions(**options), gpus_of_nodes) is None) == enough


def test_the_optimizer_of_the_policy_and_of_the_critic() -> None:
    config = mapping_of(Ppo(PpoOptions(critic_learning_rate=3e-3)))
    actor, critic = "actor_rollout_ref.actor.optim", "critic.optim"
    assert (config[f"{actor}.lr"], config[f"{critic}.lr"]) == (2e-4, 3e-3)
    for optimizer in (actor, critic):
        assert config[f"{optimizer}.lr_scheduler_type"] == "cosine"
    assert config["trainer.total_training_steps"] == config[f"{actor}.total_training_steps"] == 40


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("training_steps", [(1, 2, 3, 4), (2, 4), (1, 4)])
def test_step_sizes_are_the_torch_engines(schedule: Literal["constant", "cosine"], training_steps: list[int]) -> None:
    """Two optimizer steps an update, a warm-up of three, training steps without an update; over checkpoints too."""

    def new() -> tuple[torch.optim.Optimizer, StepSizes]:
        settings = SimpleNamespace(lr_scheduler_type=schedule, lr_warmup_steps=3, total_training_steps=4)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        return optimizer, StepSizes(optimizer, settings)

    section = OptimizerSection(learning_rate=0.5, schedule=schedule, warmup_steps=3)
    oracle = PolicyOptimizer([torch.nn.Parameter(torch.zeros(1))], section, training_steps=4)
    optimizer, sizes = new()
    assert optimizer.param_groups[0]["lr"] > 0
    for training_step in training_steps:
        saved = sizes.state_dict()
        optimizer, sizes = new()
        sizes.load_state_dict(saved)
        oracle.training_step = sizes.training_step = training_step
        for _ in range(2):
            sizes.apply()
            assert sizes.get_last_lr() == [pytest.approx(oracle.learning_rate)]
            sizes.steps += 1
            oracle.steps += 1
        sizes.step()  # As veRL does at the end of an update.


def test_an_algorithm_is_asked_for_what_it_needs_whatever_its_options_are_called(tmp_path: Path) -> None:
    def settings(**options: Any) -> dict[str, Any]:
        context = engine_context(tmp_path, "/models/m", optimizer=OPTIMIZER, algorithm_options=options)
        return mapped(VerlOptions(), context, ChosenAlgorithm.of_run(context).build(), False)

    plain, leashed = settings(), settings(leash=0.1)
    assert plain["critic.enable"] is plain["actor_rollout_ref.actor.use_kl_loss"] is False
    assert leashed["actor_rollout_ref.actor.use_kl_loss"] is True
    assert plain["actor_rollout_ref.actor.optim.lr_warmup_steps"] == 5
    with pytest.raises(ConfigError, match=r"algorithm\.conformance"):
        settings(rounds="many")


@pytest.mark.parametrize(
    ("model", "spec", "fused"),
    [
        (Qwen2Config(), {}, True),
        (Gemma2Config(), {}, False),
        (Qwen2Config(), {"trust_remote_code": True}, False),
        (Qwen2Config(), {"lora": {"targets": ["q_proj"]}}, True),
        (Qwen2Config(), {"lora": {"targets": ["q_proj", "lm_head"]}}, False),
        (None, {}, False),
    ],
)
def test_log_probabilities_are_fused_where_that_is_exact(
    tmp_path: Path, model: PretrainedConfig | None, spec: dict[str, Any], fused: bool
) -> None:
    if model is not None:
        model.save_pretrained(tmp_path)
    key = "actor_rollout_ref.model.use_fused_kernels"
    assert mapping_of(spec={"model": str(tmp_path), **spec})[key] is fused
    assert key not in mapping_of(spec={"model": str(tmp_path)}, overrides=["model_engine=megatron"])


def test_training_computes_what_is_served(tmp_path: Path) -> None:
    """No dropout that pretraining had, and scores capped as the model says."""
    model = "actor_rollout_ref.model.override_config"
    OPTConfig().save_pretrained(tmp_path)
    config = mapping_of(spec={"model": str(tmp_path)}, cpu=True)
    assert config[f"{model}.dropout"] == config["critic.model.override_config.dropout"] == 0
    assert config[f"{model}.attn_implementation"] == "sdpa"
    Gemma2Config().save_pretrained(tmp_path)
    for options in ({"cpu": True}, {"attention": "sdpa"}):
        assert mapping_of(spec={"model": str(tmp_path)}, **options)[f"{model}.attn_implementation"] == "eager"
    assert f"{model}.attn_implementation" not in mapping_of(spec={"model": str(tmp_path)})


def test_determinism_is_asked_of_training_and_serving_or_refused() -> None:
    context = context_of(deterministic=True)
    config = mapped(VerlOptions(), context, grpo(), False)
    assert config["actor_rollout_ref.rollout.full_determinism"] is True
    assert config["actor_rollout_ref.actor.fsdp_config.full_determinism"] is True
    assert variables(cpu=False, api_key="k", deterministic=True, cache_mib=1)["VLLM_BATCH_INVARIANT"] == "1"
    on_cpu = variables(cpu=True, api_key="secret", deterministic=False, cache_mib=3000)
    assert (on_cpu["VLLM_CPU_KVCACHE_SPACE"], on_cpu["VLLM_API_KEY"]) == ("2", "secret")
    with pytest.raises(ConfigError, match="torch engine"):
        mapped(VerlOptions(), context, grpo(), True)


UNREAD = [
    "trainer.default_hdfs_dir", "trainer.rollout_data_dir", "trainer.log_val_generations", "trainer.balance_batch",
    "trainer.max_actor_ckpt_to_keep", "trainer.del_local_ckpt_after_load", "trainer.project_name",
    "trainer.esi_redundant_time", "global_profiler.steps", "critic.profiler.enable", "critic.loss_scale_factor",
    "skip.rollout.enable",
    "actor_rollout_ref.actor.kl_loss_type", "actor_rollout_ref.rollout.ignore_eos",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("actor_rollout_ref.actor.ppo_epochs=3", "epochs"),
        ("+data.train_files=x", "tasks"),
        ("algorithm.lam=0.5", "algorithm"),
        ("~trainer.logger", "trackers"),
        ("actor_rollout_ref.actor.optim.lr=1", "learning_rate"),
        ("actor_rollout_ref.rollout.nnodes=2", "serving_gpus"),
        ("actor_rollout_ref.hybrid_engine=False", "serving_gpus"),
        ("critic.model.target_modules=all-linear", "lora"),
        ("actor_rollout_ref.rollout.seed", "KEY=VALUE"),
        *((f"{key}=1", "no part of veRL that agl runs reads it") for key in UNREAD),
    ],
)
def test_what_agl_decides_is_refused_with_the_place(override: str, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        refuse_decided(override)


def test_an_adapter_is_asked_of_verl_and_served_beside_the_others() -> None:
    lora = {"rank": 8, "alpha": 16.0, "targets": ("q_proj",)}
    for config in (mapping_of(spec={"lora": lora}), mapping_of(spec={"lora": lora}, cpu=True, serving_gpus=1)):
        assert config["actor_rollout_ref.model.lora_rank"] == 8
        assert repr(config["actor_rollout_ref.model.lora_alpha"]) == "16", "veRL wants an integer"
        assert config["actor_rollout_ref.model.target_modules"] == ["q_proj"]
        assert config["critic.model.target_modules"] == ["q_proj", "score"], "a frozen last layer would stay at zero"
        assert config["actor_rollout_ref.rollout.engine_kwargs.vllm.max_cpu_loras"] == 1
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm.max_cpu_loras" not in mapping_of()
    solver, checker = (PolicySpec("/models/m", lora=lora, algorithm=name) for name in ("grpo", "ppo"))
    context = context_of(policies={"solver": solver, "checker": checker})
    chosen = ChosenAlgorithm.of_run(context)
    assert chosen.name == "ppo", "veRL makes a critic if any policy needs one"
    config = mapped(VerlOptions(), context, chosen.build(), False)
    assert config["actor_rollout_ref.rollout.engine_kwargs.vllm.served_model_name"] == ["solver", "checker"]
    assert config["actor_rollout_ref.rollout.engine_kwargs.vllm.max_cpu_loras"] == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora": None}, "'solver' and 'checker' differ in lora"),
        ({"lora": {"rank": 4}}, "'solver' and 'checker' differ in lora"),
        ({"model": "/models/other"}, "'solver' and 'checker' differ in model"),
    ],
)
def test_policies_that_cannot_share_a_base_are_refused_with_the_difference(
    changes: dict[str, Any], reason: str
) -> None:
    solver = PolicySpec("/models/m", lora={"rank": 8})
    with pytest.raises(ConfigError, match=reason):
        VerlEngine(VerlOptions(), context_of(policies={"solver": solver, "checker": replace(solver, **changes)}))
    full = PolicySpec("/models/m")
    with pytest.raises(ConfigError, match="'solver' is none"):
        VerlEngine(VerlOptions(), context_of(policies={"solver": full, "checker": full}))


# veRL's model engines: FSDP2 gets agl's settings, any other is the user's by `overrides`.

ACTOR, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
FSDP = (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp")
MEGATRON: dict[str, Any] = {"overrides": ["model_engine=megatron"]}


def test_policy_reference_and_critic_are_computed_alike() -> None:
    """veRL's own default for a reference is bfloat16, whatever the policy has."""
    for dtype, cpu, offload in (("float32", False, True), ("bfloat16", False, False), ("auto", True, False)):
        config = mapping_of(grpo(beta=0.1), cpu=cpu, spec={"dtype": dtype}, offload=offload)
        settings = [
            {key.removeprefix(part): value for key, value in config.items() if key.startswith(f"{part}.")}
            for part in FSDP
        ]
        settings[0].pop(".seed")
        assert settings[0] == settings[1] == settings[2]
        assert settings[1][".param_offload"] is offload
        assert settings[1][".mixed_precision.param_dtype"] == ("bf16" if dtype == "bfloat16" else "fp32")


def test_tokens_of_a_transition_are_spread_over_whole_shares_of_the_gpus_by_flash_attention() -> None:
    spread: dict[str, Any] = {"gpus_per_node": 4, "sequence_parallel": 2}
    config = mapping_of(**spread)
    assert [config[f"{part}.ulysses_sequence_parallel_size"] for part in FSDP] == [2, 2, 2]
    for unable in ({"attention": "sdpa"}, {"cpu": True}):
        with pytest.raises(ConfigError, match=r"sequence_parallel.*flash-attention"):
            mapping_of(**spread, **unable)


def test_another_engine_gets_none_of_fsdps_keys_and_the_schedule_by_its_own_name() -> None:
    config = mapping_of(spec={"optimizer": {"schedule": "cosine"}}, **MEGATRON)
    assert not [key for key in config if "fsdp" in key or key.endswith(".strategy")]
    assert config[f"{ACTOR}.optim.lr_decay_style"] == "cosine"
    assert f"{ACTOR}.optim.lr_scheduler_type" not in config


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cpu": True}, "it needs GPUs"),
        ({"spec": {"lora": {"rank": 8}}}, "LoRA"),
        ({"attention": "sdpa"}, "attention"),
        ({"offload": True}, "are FSDP's"),
        ({"algorithm": Ppo(PpoOptions())}, "critics start at random"),
    ],
)
def test_what_does_not_go_with_another_engine_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"model_engine=megatron does not go with these settings: .*{reason}"):
        mapping_of(**{**MEGATRON, **settings})
