"""What a run would take: every part of it counts, and more of anything takes no less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_core.protocols import EngineContext, PolicySpec
from agl_core.types import Needs, Workload
from agl_torch import memory
from agl_torch.plugin import TorchOptions
from agl_torch.process import Policies

WORK = Workload(steps=10, groups=4, group_size=8, evaluated=200, prompt_tokens=50, response_tokens=20)


@pytest.fixture(autouse=True)
def _steady_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The speed of this machine is no matter of these tests; nor do they leave torch another number of threads."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(memory, "token_seconds", lambda model, device: 1e-3)
    yield
    torch.set_num_threads(threads)


def needs(checkpoint: Path, work: Workload = WORK, **changes: Any) -> Needs:
    """Of one policy; `changes` are the engine's options or its policy's, by name."""
    settings = {"algorithm": "grpo", "algorithm_options": {"beta": 0.0}}
    settings |= {name: changes.pop(name) for name in list(changes) if name in PolicySpec.__dataclass_fields__}
    policies = {"default": PolicySpec(str(checkpoint), **settings)}
    context = EngineContext(checkpoint.parent, 0, policies, False, (), "key")
    return Policies(TorchOptions(**{"cache_mib": 16, **changes}), context).estimate(work)


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
    least = needs(checkpoint)
    assert memory.PROCESS < least.memory_bytes < needs(checkpoint, **more).memory_bytes
    assert least.available_bytes > 0


def test_more_work_and_more_passes_take_longer(checkpoint: Path) -> None:
    least = needs(checkpoint).seconds
    for field in ("steps", "groups", "group_size", "evaluated", "prompt_tokens", "response_tokens"):
        assert needs(checkpoint, replace(WORK, **{field: 2 * getattr(WORK, field)})).seconds > least
    for options in ({"beta": 0.1}, {"beta": 0.0, "epochs": 2}, {"beta": 0.0, "minibatches": 2}):
        assert needs(checkpoint, algorithm_options=options).seconds > least
