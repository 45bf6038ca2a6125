"""The settings of an engine process, applied without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl_core.config.sections import LARGEST
from agl_core.errors import EngineError
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.training.child import UpdateRequest
from agl_torch.memory import ACTIVATIONS_ON_CPU, activation_bytes, tokens_per_pass
from agl_torch.plugin import TorchOptions
from agl_torch.process import Policies
from agl_torch.serving.requests import Request

from .conftest import LORA, Shape, make_batch, make_checkpoint, weights_of


def load(checkpoint: Path, **options: Any) -> Policies:
    context = EngineContext(checkpoint.parent, 0, {"default": PolicySpec(str(checkpoint))}, False, (), "key")
    return Policies(TorchOptions(**({"cache_mib": 16} | options)), context)


def test_a_tiny_model_samples_on_one_thread_and_trains_on_all(checkpoint: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        policies = load(checkpoint)
        assert torch.get_num_threads() == 1
        seen: set[int] = set()
        model = policies.policies["default"].loaded.model
        model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
        policies.update(UpdateRequest("default", "grpo", {"beta": 0.0}, make_batch(None)), lambda _: None)
        assert seen == {3}
        assert torch.get_num_threads() == 1
        load(checkpoint, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_pass_has_as_many_tokens_as_its_memory_allows(tmp_path: Path) -> None:
    """Checked against what torch itself keeps: the bytes that a backward pass frees."""
    model: Any = load(make_checkpoint(tmp_path / "four", Shape(layers=4))).policies["default"].loaded.model
    device = torch.device("cpu")
    ids = torch.randint(3, 300, (4, 64))

    def kept() -> int:
        seen: dict[int, torch.Tensor] = {}
        weights = {p.data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            model.model(input_ids=ids, use_cache=False)
        return sum(t.nbytes for at, t in seen.items() if at not in weights)

    plain = activation_bytes(model, device)
    assert plain == pytest.approx(kept() / ids.numel(), rel=0.3)
    assert tokens_per_pass(model, device) == int(ACTIVATIONS_ON_CPU / plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert activation_bytes(model, device) < 0.5 * plain
    assert not model.training


def test_a_cache_that_holds_no_reply_is_refused_by_the_names_of_its_settings(tmp_path: Path) -> None:
    # 48 layers of 256 tokens of 2 x 256 floats: 25 MB for one reply.
    wide = make_checkpoint(tmp_path / "wide", Shape(layers=48, hidden=256))
    with pytest.raises(EngineError, match=r"engine\.torch\.cache_mib, or lower engine\.torch\.max_context"):
        load(wide, cache_mib=1)


def test_an_update_has_the_memory_of_the_cache(checkpoint: Path) -> None:
    policies = load(checkpoint)
    sampler = policies.policies["default"].sampler
    held = {sampler.cache_nbytes}
    policies.policies["default"].loaded.model.register_forward_pre_hook(lambda *_: held.add(sampler.cache_nbytes))
    policies.update(UpdateRequest("default", "grpo", {"beta": 0.0}, make_batch(None)), lambda _: None)
    assert 0 in held
    assert sampler.cache_nbytes == max(held) > 0
    sampler.submit(Request("a", np.array([5, 6, 7], dtype=np.int32), max_tokens=4))
    [reply] = [done for _ in range(9) for done in sampler.step()]
    assert reply.version == 1


def test_a_failed_update_that_moved_weights_makes_a_version(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = load(checkpoint)
    policy = policies.policies["default"]
    before = weights_of(policy.loaded.model)
    step = policy.trainer.optimizer.step

    def fail_after(*_: Any) -> Any:
        step()
        raise MemoryError("too little")

    monkeypatch.setattr(policy.trainer.optimizer, "step", fail_after)
    request = UpdateRequest("default", "grpo", {"beta": 0.0}, make_batch(None))
    with pytest.raises(MemoryError):
        policies.update(request, lambda _: None)
    after = weights_of(policy.loaded.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert policies.versions == {"default": 1}


@pytest.mark.parametrize(("lora", "times"), [(None, 1), (LORA, 10)])
def test_a_step_size_that_is_left_out_follows_from_the_model(
    checkpoint: Path, lora: dict[str, Any] | None, times: int
) -> None:
    spec = PolicySpec(str(checkpoint), lora=lora)
    context = EngineContext(checkpoint.parent, 0, {"default": spec}, False, (), "key")
    trainer = Policies(TorchOptions(cache_mib=16), context).policies["default"].trainer
    assert trainer.optimizer.learning_rate == pytest.approx(times * LARGEST)  # a toy's is the largest there is
