"""veRL's configuration as a run would have it, composed from veRL's own files. Needs Hydra and veRL, starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_core.protocols import EngineContext, PolicySpec
from agl_verl.config import ChosenAlgorithm, compose
from agl_verl.environment import check_versions, variables
from agl_verl.options import VerlOptions

from . import verl_bench

TRAINER, SERVER = "verl.trainer.ppo.v1", "verl.workers.rollout.vllm_rollout.vllm_async_server"
OVERRIDDEN = {
    f"{TRAINER}:PPOTrainer": "init _build_replay_buffer _init_dataloader _load_checkpoint on_init_end on_step_end "
    "_step_once _balance_batch _compute_advantage _update_critic _update_actor _init_resource_pool_mgr "
    "_compute_old_log_prob",
    f"{TRAINER}:PPOTrainerColocateAsync": "on_sample_end",
    f"{TRAINER}:PPOTrainerSeparateAsync": "on_sample_end _setup",
    "verl.single_controller.base.worker_group:WorkerGroup": "",
    "verl.workers.engine_workers:ActorRolloutRefWorker": "set_loss_fn actor_worker_cls compute_log_prob",
    "verl.workers.engine_workers:TrainingWorker": "set_loss_fn train_mini_batch",
    "verl.workers.engine.base:BaseEngine": "train_batch",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine": "get_per_tensor_param",
    "verl.workers.engine.fsdp.transformer_impl:logprobs_from_logits": "",
    "verl.utils.experimental.torch_functional:_fused_linear_for_ppo_fwd": "",
    "verl.utils.model:load_valuehead_model": "",
    "verl.workers.rollout.replica:RolloutReplicaRegistry": "register",
    f"{SERVER}:vLLMReplica": "",
    f"{SERVER}:vLLMHttpServer": "run_server abort_all_requests set_global_steps open_submission_gate collective_rpc "
    "lora_as_adapter",
    "verl.utils.vllm:TensorLoRARequest": "",
    "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens": "serve_tokens",
    "vllm.exceptions:VLLMServerError": "",
    "vllm.v1.engine.async_llm:AsyncLLM": "errored",
    "verl.plugin.platform.platform_manager:PlatformRegistry": "register",
    "verl.utils.distributed:initialize_global_process_group_ray": "",
    "verl.utils.fsdp_utils:CPUOffloadPolicy": "",
    "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension": "update_weights_from_ipc _update_weights",
}
"""Names that are not veRL's public interface, and that this package overrides or replaces."""
CALC = Path(__file__).resolve().parents[3] / "examples" / "calc" / "train.toml"


def dry_run(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    agl = str(Path(sys.executable).with_name("agl"))
    chosen = [f"--set={setting}" for setting in (f"runs={tmp_path / 'runs'}", "engine.verl.device=cpu", *settings)]
    command = [agl, "train", str(CALC), "--engine", "verl", "--dry-run", *chosen]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_dry_run_shows_the_configuration_and_the_resources_and_starts_nothing(tmp_path: Path) -> None:
    sharding = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False"
    overrides = f'engine.verl.overrides=["{sharding}", "+actor_rollout_ref.model.mine=1"]'
    done = dry_run(tmp_path, "algorithm.name=ppo", overrides)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert {
        "critic.enable=true",
        "critic.optim.lr=0.001",
        sharding,
        "+actor_rollout_ref.model.mine=1",
        f'actor_rollout_ref.model.path="{CALC.parent / "policy"}"',
    } <= set(shown)
    assert shown[-1].endswith("It would take 1 (nodes) x 1 CPU worker processes, which train and serve by turns.")
    assert not (tmp_path / "runs").exists()


def test_the_versions_that_are_installed_are_known() -> None:
    check_versions(cpu=True)


def test_every_place_that_reaches_into_verl_is_there() -> None:
    """In a process of the engine: others do not have what mends veRL on a CPU."""
    of_engine = variables(cpu=True, api_key="key", deterministic=False, cache_mib=16)
    code = (
        "import json, pkgutil, sys\n"
        "for place, names in json.loads(sys.argv[1]).items():\n"
        "    owner = pkgutil.resolve_name(place)\n"
        "    missing = [name for name in names.split() if not hasattr(owner, name)]\n"
        "    assert not missing, (place, missing)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(OVERRIDDEN)]
    done = subprocess.run(command, env={**os.environ, **of_engine}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "engine"), [("dp", "fsdp_config"), ("megatron", "megatron"), ("veomni", "veomni")])
def test_verls_own_classes_take_the_configuration_of_every_model_engine(name: str, engine: str) -> None:
    verl_bench.one_process()
    from verl.utils.config import omega_conf_to_dataclass

    policy = PolicySpec(str(CALC.parent / "policy"), "bfloat16", optimizer={"learning_rate": 1e-4})
    context = EngineContext(Path("unused"), 3, {"default": policy}, False, (), "key", 10)
    offload = [f"{role}.{engine}.param_offload=True" for role in ("actor_rollout_ref.actor", "critic")]
    overrides = {"dp": [], "megatron": ["model_engine=megatron", *offload], "veomni": ["model_engine=veomni", *offload]}
    options = VerlOptions(device="cuda", gpus_per_node=4, overrides=overrides[name])
    algorithm = ChosenAlgorithm.of("grpo", {"beta": 0.1}).build()
    config = compose(options, context, algorithm=algorithm, cpu=False)
    actor, critic = map(omega_conf_to_dataclass, (config.actor_rollout_ref.actor, config.critic))
    assert actor.engine.param_offload is critic.engine.param_offload is (name != "dp")
    assert actor.optim.lr == 1e-4
    assert type(actor.engine) is type(critic.engine)


def test_a_key_that_means_nothing_is_an_error(tmp_path: Path) -> None:
    done = dry_run(tmp_path, 'engine.verl.overrides=["actor_rollout_ref.rollout.gpu_memory=0.4"]')
    assert done.returncode != 0
    assert "actor_rollout_ref.rollout.gpu_memory=0.4 means nothing to veRL" in " ".join(
        (done.stdout + done.stderr).split()
    )
