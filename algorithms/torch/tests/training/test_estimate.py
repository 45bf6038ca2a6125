"""What a run would take: every part of it counts, and more of anything takes no less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types.estimates import Needs, Workload
from agl_torch.engine import TorchEngine
from agl_torch.models import estimate
from agl_torch.options import TorchOptions
from agl_torch.policies import Policies

from .conftest import LORA

WORK = Workload(steps=10, groups=4, group_size=8, evaluated=200, prompt_tokens=50, response_tokens=20)


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The speed of this machine is no matter of these tests; nor do they leave torch another number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(estimate, "token_seconds", lambda model, device: 1e-3)
    yield
    torch.set_num_threads(threads)


def needs(checkpoint: Path, work: Workload = WORK, **changes: Any) -> Needs:
    """Of one policy; `changes` are the engine's options or its policy's, by name."""
    given = {"algorithm": "grpo", "algorithm_options": {"beta": 0.0}}
    given |= {name: changes.pop(name) for name in list(changes) if name in PolicySpec.__dataclass_fields__}
    context = EngineContext(checkpoint.parent, 0, {"default": PolicySpec(str(checkpoint), **given)}, False, (), "key")
    return Policies.load(TorchOptions(**{"cache_mib": 16, **changes}), context).estimate(work)


def test_memory_is_more_than_the_process_and_less_than_a_small_machine_has(checkpoint: Path) -> None:
    found = needs(checkpoint)
    assert estimate.PROCESS < found.memory_bytes < 3 * 2**30
    assert found.available_bytes > 0


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm_options": {"beta": 0.1}},
        {"algorithm": "ppo", "algorithm_options": {}},
        {"cache_mib": 1024, "max_rows": 4096},
        {"tokens_per_micro_batch": 10**6},
    ],
)
def test_what_a_run_has_beside_its_weights_takes_memory(checkpoint: Path, more: dict[str, Any]) -> None:
    assert needs(checkpoint, **more).memory_bytes > needs(checkpoint).memory_bytes


def test_an_adapter_takes_less_than_all_weights(checkpoint: Path) -> None:
    full, adapter = (
        needs(checkpoint, lora=lora, tokens_per_micro_batch=1, algorithm_options={"beta": 0.1}) for lora in (None, LORA)
    )
    assert adapter.memory_bytes < full.memory_bytes


@pytest.mark.parametrize(
    "more",
    [
        {"steps": 20},
        {"groups": 8},
        {"group_size": 16},
        {"evaluated": 400},
        {"prompt_tokens": 100},
        {"response_tokens": 40},
    ],
)
def test_more_work_takes_longer(checkpoint: Path, more: dict[str, int]) -> None:
    assert needs(checkpoint, replace(WORK, **more)).seconds > needs(checkpoint).seconds


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"beta": 0.0, "epochs": 2}, {"beta": 0.0, "minibatches": 2}])
def test_more_passes_take_longer(checkpoint: Path, options: dict[str, Any]) -> None:
    assert needs(checkpoint, algorithm_options=options).seconds > needs(checkpoint).seconds


async def test_the_engine_is_asked_for_it(checkpoint: Path, tmp_path: Path) -> None:
    spec = PolicySpec(str(checkpoint), algorithm="grpo", algorithm_options={"beta": 0.0})
    engine = TorchEngine(
        TorchOptions(cache_mib=16, device="cpu"), EngineContext(tmp_path, 0, {"default": spec}, False, (), "key")
    )
    assert engine.supports("estimate")
    try:
        await engine.start()
        found = await engine.estimate(WORK)
    finally:
        await engine.stop()
    assert found.memory_bytes > estimate.PROCESS
    assert found.seconds > 0
