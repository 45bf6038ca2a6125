"""Where this package uses parts of veRL that are not its public interface, and whether they are all still there.

What it overrides or replaces would do nothing, in silence, if veRL had moved it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

from agl_core.errors import EngineError


@dataclass(frozen=True, slots=True)
class Internal:
    """One place."""

    module: str
    names: tuple[str, ...]
    """Attributes in it, with dots below classes."""
    use: str
    """What agl does with them."""
    cpu_only: bool = False

    def missing(self) -> list[str]:
        """Those that are not there."""
        try:
            module = importlib.import_module(self.module)
        except ImportError:
            return [f"{self.module}.{name}" for name in self.names]
        return [f"{self.module}.{name}" for name in self.names if not _has(module, name)]


_TRAINER, _SERVER = "verl.trainer.ppo.v1", "verl.workers.rollout.vllm_rollout.vllm_async_server"

INTERNALS = (
    Internal(
        _TRAINER,
        tuple(
            f"PPOTrainer.{name}"
            for name in (
                "init",
                "_init_dataloader",
                "_load_checkpoint",
                "on_init_end",
                "on_step_end",
                "prepare_step",
                "_step_once",
                "_submit_batch_to_rollout",
                "_balance_batch",
                "_compute_advantage",
                "_update_critic",
                "_update_actor",
                "_init_resource_pool_mgr",
                "_compute_old_log_prob",
            )
        ),
        "an update is agl's: its rows, their order, advantages and weights",
    ),
    Internal(
        _TRAINER,
        (
            "PPOTrainerColocateAsync.on_sample_end",
            "PPOTrainerSeparateAsync.on_sample_end",
            "PPOTrainerSeparateAsync._setup",
        ),
        "nothing is served while weights are trained, or servers of their own go on",
    ),
    Internal(
        "verl.single_controller.base.worker_group",
        ("WorkerGroup",),
        "`_dispatch_info` says how many workers the rows are dealt out to",
    ),
    Internal(
        "verl.workers.engine_workers",
        ("ActorRolloutRefWorker.set_loss_fn", "TrainingWorker.set_loss_fn", "TrainingWorker.train_mini_batch"),
        "the workers compute agl's losses",
    ),
    Internal(
        "verl.workers.engine.base",
        ("BaseEngine.train_batch",),
        "the step size follows the run's training steps",
    ),
    Internal("verl.utils.model", ("load_valuehead_model",), "a critic's values start at zero"),
    Internal("verl.workers.rollout.replica", ("RolloutReplicaRegistry.register",), "vLLM's servers are agl's"),
    Internal(
        _SERVER,
        (
            "vLLMReplica",
            "vLLMHttpServer.run_server",
            "vLLMHttpServer.abort_all_requests",
            "vLLMHttpServer.set_global_steps",
            "vLLMHttpServer.open_submission_gate",
        ),
        "replies are of one version, and only the run gets any",
    ),
    Internal(
        "verl.plugin.platform.platform_manager", ("PlatformRegistry.register",), "a CPU is a platform", cpu_only=True
    ),
    Internal(
        "verl.utils.distributed",
        ("initialize_global_process_group_ray",),
        "the process group is gloo's",
        cpu_only=True,
    ),
    Internal("verl.utils.fsdp_utils", ("CPUOffloadPolicy",), "the reference is in plain memory", cpu_only=True),
    Internal(
        "verl.workers.rollout.vllm_rollout.utils",
        ("vLLMColocateWorkerExtension.update_weights_from_ipc",),
        "vLLM takes new weights as it loads a checkpoint",
        cpu_only=True,
    ),
)
"""All of them; the README has the same table."""


def check(*, cpu: bool, internals: Iterable[Internal] = INTERNALS) -> None:
    """EngineError with everything that veRL has moved, and what agl did with it. Imports veRL and vLLM."""
    wanted = [each for each in internals if cpu or not each.cpu_only]
    moved = [f"{name} ({each.use})" for each in wanted for name in each.missing()]
    if moved:
        raise EngineError(
            f"This veRL has moved what agl-verl overrides or replaces: {'; '.join(moved)}. Without that a run would "
            f"train something else. Install a veRL that was tested (agl_verl/cluster/versions.py)."
        )


def table() -> str:
    """The README's."""
    rows = [
        f"| `{reach.module}`{' (CPU)' if reach.cpu_only else ''} | {', '.join(f'`{name}`' for name in reach.names)} "
        f"| {reach.use} |"
        for reach in INTERNALS
    ]
    return "\n".join(["| module | what | so that |", "|---|---|---|", *rows])


def _has(place: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True
