"""What has to be there before anything starts on GPUs, said at once: CUDA, free memory, and packages."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from agl_core.errors import EngineError
from agl_verl.config.mapping import model_engine
from agl_verl.options import VerlOptions

GIB = 2**30


def check(options: VerlOptions, *, critic: bool, exchange: str) -> None:
    """EngineError with everything that is missing, and what helps.

    Packages are looked for on this node: every other has to have the same. GPUs are those of this node, so they are
    looked at only without a cluster. `exchange` is veRL's name of the way that weights go to servers.
    """
    missing = list(_packages(options, critic=critic, exchange=exchange))
    if options.address is None:
        missing += _gpus(options)
    if missing:
        raise EngineError(f"The veRL engine cannot start: {' '.join(missing)}")


def exchange_of(config: Any) -> str:
    """The name of it in veRL's whole configuration."""
    return str(config.actor_rollout_ref.rollout.checkpoint_engine.backend)


def _packages(options: VerlOptions, *, critic: bool, exchange: str) -> Iterator[str]:
    by_flash = options.attention in ("auto", "flash_attention_2")
    if model_engine(options) != "megatron" and (by_flash or critic) and not _installed("flash_attn"):
        remedy = "" if critic else ", or set engine.verl.attention = 'sdpa'"
        yield (
            f"flash-attn is not installed, with which {'a critic' if critic else 'training'} computes attention on "
            f"GPUs: pip install flash-attn --no-build-isolation{remedy}."
        )
    if options.serving_gpus and exchange == "nccl" and not _installed("cupy"):
        yield (
            "CuPy is not installed, with which weights go to servers of their own (engine.verl.serving_gpus): pip "
            "install cupy-cuda13x, or cupy-cuda12x with a torch for CUDA 12."
        )


def _gpus(options: VerlOptions) -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return [
            "engine.verl.device is 'cuda', and torch finds no CUDA GPU here. Use device = 'cpu' for a tiny model, join "
            "a cluster that has GPUs with engine.verl.address, or install a torch build for your GPU."
        ]
    if options.serving_gpus:  # Which of them serve is Ray's to choose.
        return []
    return crowded(memory_of(min(options.gpus_per_node, torch.cuda.device_count())), options)


def memory_of(gpus: int) -> list[tuple[int, int]]:
    """Free and all bytes of so many GPUs, asked by another process: asking takes memory on each of them."""
    code = f"import json, torch; print(json.dumps([torch.cuda.mem_get_info(number) for number in range({gpus})]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"torch cannot use the GPUs of this node: {reason}")
    return [(free, whole) for free, whole in json.loads(done.stdout)]


def crowded(memory: Sequence[tuple[int, int]], options: VerlOptions) -> list[str]:
    """A sentence for each GPU that has less memory free than serving takes; `memory`: free and all bytes of each.

    >>> print(*crowded([(70 * GIB, 80 * GIB), (10 * GIB, 80 * GIB)], VerlOptions(serving_memory=0.5)))
    GPU 1 has 10 of its 80 GiB free, and serving alone takes 40 (serving_memory): end what else runs there, or lower it.
    """
    return [
        f"GPU {number} has {free / GIB:.0f} of its {whole / GIB:.0f} GiB free, and serving alone takes "
        f"{options.serving_memory * whole / GIB:.0f} (serving_memory): end what else runs there, or lower it."
        for number, (free, whole) in enumerate(memory)
        if free < options.serving_memory * whole
    ]


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
