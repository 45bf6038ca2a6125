"""Environment variables by which the processes of a run know what they belong to."""

from __future__ import annotations

import os
from collections.abc import Collection

ENGINE_VARIABLE = "AGL_VERL_ENGINE"
"""Set to 1 in every process of agl's veRL engine: a veRL run of its own is left as it is."""
CPU_VARIABLE = "AGL_VERL_CPU"
"""Set to 1 in every process of an engine that has no GPU."""
MODULES_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
"""veRL's own: what it imports when it is imported, with commas between."""
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own: the key of its model calls."""
_QUIET = {
    "RAY_COLOR_PREFIX": "0",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",  # One for each model engine that is not installed.
}
"""So that `engine.log` has what happened, without colours, bars and what every process says of itself."""


def variables(
    *, cpu: bool, api_key: str, deterministic: bool, cache_mib: int, modules: Collection[str] = ()
) -> dict[str, str]:
    """What every process of the engine needs in its environment, whatever node it is on.

    `modules` are imported by veRL, besides those that this process's environment names already.
    """
    common = {
        ENGINE_VARIABLE: "1",
        KEY_VARIABLE: api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRANSFER_QUEUE_ENABLE": "1",
        **_QUIET,
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),  # With more than there are it warns at every access.
    }
    wanted = dict.fromkeys([*filter(None, os.environ.get(MODULES_VARIABLE, "").split(",")), *modules])
    if wanted:
        common[MODULES_VARIABLE] = ",".join(wanted)
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
