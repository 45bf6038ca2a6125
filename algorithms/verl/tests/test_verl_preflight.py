"""What is looked for before anything starts, and how little an engine's log says of itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from agl_core.errors import EngineError
from agl_verl.cluster import preflight
from agl_verl.cluster.environment import variables
from agl_verl.options import VerlOptions

GPU = (70 * preflight.GIB, 80 * preflight.GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With GPUs, and the packages that are named."""

    def made(*packages: str, gpus: int = 1, memory: tuple[int, int] = GPU) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(preflight, "memory_of", lambda count: [memory] * count)
        for name in ("flash_attn", "cupy"):
            module = ModuleType(name)
            module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
            monkeypatch.setitem(sys.modules, name, module if name in packages else None)

    return made


def missing(*, critic: bool = False, exchange: str = "naive", **settings: Any) -> str:
    """What is said of it; empty if nothing is missing."""
    try:
        preflight.check(VerlOptions(**settings), critic=critic, exchange=exchange)
    except EngineError as error:
        return str(error)
    return ""


def test_everything_that_is_missing_is_said_at_once(machine: Any) -> None:
    machine(gpus=0)
    said = missing(serving_gpus=1, exchange="nccl")
    for part in ("flash-attn", "attention = 'sdpa'", "cupy-cuda13x", "no CUDA GPU"):
        assert part in said
    machine("flash_attn", "cupy")
    assert missing(serving_gpus=1, exchange="nccl") == ""


def test_only_what_the_settings_need_is_looked_for(machine: Any) -> None:
    machine()
    assert missing(attention="sdpa") == ""
    assert "a critic" in missing(attention="sdpa", critic=True)
    assert missing(overrides=["model_engine=megatron"]) == "", "it brings attention of its own"
    assert missing(attention="sdpa", serving_gpus=1, exchange="mooncake") == ""
    machine(gpus=0)
    assert missing(attention="sdpa", address="auto") == "", "the cluster's GPUs are on other nodes"


def test_a_gpu_that_is_in_use_is_named(machine: Any) -> None:
    machine(memory=(10 * preflight.GIB, 80 * preflight.GIB))
    assert "GPU 0 has 10 of its 80 GiB free" in missing(attention="sdpa")
    assert missing(attention="sdpa", serving_memory=0.1) == ""


def test_gpus_that_cannot_be_asked_are_an_error_with_the_reason() -> None:
    if torch.cuda.is_available():
        assert all(0 < free <= whole for free, whole in preflight.memory_of(1))
        return
    with pytest.raises(EngineError, match=r"torch cannot use the GPUs of this node: .*(CUDA|NVIDIA)"):
        preflight.memory_of(1)


def test_the_log_has_no_colours_bars_and_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = variables(cpu=True, api_key="k", deterministic=False, cache_mib=1)
    assert (found["RAY_COLOR_PREFIX"], found["TQDM_DISABLE"], found["TQ_NUM_THREADS"]) == ("0", "1", "2")
