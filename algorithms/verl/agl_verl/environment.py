"""The surroundings of a run: environment variables of its processes, and packages, checked before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

from packaging.requirements import Requirement

from agl_core.errors import EngineError

ENGINE_VARIABLE = "AGL_VERL_ENGINE"
"""Set to 1 in every process of agl's veRL engine: a veRL run of its own is left as it is."""
CPU_VARIABLE = "AGL_VERL_CPU"
"""Set to 1 in every process of an engine that has no GPU."""
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own: the key of its model calls."""


def variables(*, cpu: bool, api_key: str, deterministic: bool, cache_mib: int) -> dict[str, str]:
    """The environment that every process of the engine needs, whatever node it is on."""
    common = {
        ENGINE_VARIABLE: "1",
        KEY_VARIABLE: api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRANSFER_QUEUE_ENABLE": "1",
        # So that `engine.log` has what happened, without colours, bars and what every process says of itself.
        "RAY_COLOR_PREFIX": "0",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",  # One for each model engine that is not installed.
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),  # With more than there are it warns at every access.
    }
    if deterministic:
        common |= {"VERL_FULL_DETERMINISM": "1", "VLLM_BATCH_INVARIANT": "1", "PYTHONHASHSEED": "0"}
    if not cpu:
        return common
    return common | {
        CPU_VARIABLE: "1",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # veRL has its FSDP engine under the names of GPUs only.
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, cache_mib // 1024)),  # in GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def check_versions(*, cpu: bool) -> None:
    """EngineError with the pip line that helps, unless the versions are those that agl-verl requires.

    These are the tested ones and later patches; of veRL the very version, since parts of it are overridden that a patch
    may move, which nothing would say.
    """
    extra = "cpu" if cpu else "gpu"
    try:
        required = map(Requirement, importlib.metadata.requires("agl-verl") or ())
    except importlib.metadata.PackageNotFoundError:  # Used from source.
        return
    wrong = []
    for requirement in required:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                version = ""
            if not version or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version or 'is missing'} (tested: {requirement.specifier})")
    if wrong:
        raise EngineError(
            f"The veRL engine does not run with these versions: {'; '.join(wrong)}. Install those that were tested: "
            f"pip install 'agl-verl[{extra}]'"
        )


def check_flash_attention(attention: str, *, critic: bool) -> None:
    """EngineError where training on GPUs computes attention by flash-attn and this node does not have it."""
    if (critic or attention in ("auto", "flash_attention_2")) and importlib.util.find_spec("flash_attn") is None:
        remedy = "" if critic else ", or set engine.verl.attention = 'sdpa'"
        raise EngineError(
            f"flash-attn is not installed, with which {'a critic' if critic else 'training'} computes attention on "
            f"GPUs: pip install flash-attn --no-build-isolation{remedy}."
        )


def runs_on_cpu(device: str, address: str | None) -> bool:
    """True for an engine without GPUs: asked to be, or 'auto' where there is none and no cluster is joined."""
    if device != "auto":
        return device == "cpu"
    if address is not None:
        return False
    import torch

    return not torch.cuda.is_available()
