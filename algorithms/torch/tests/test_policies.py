"""The policies of an engine process, without it: what they share, what an update moves, what a run would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agl_chat.backends import Request
from agl_core.config.sections import LARGEST
from agl_core.errors import EngineError
from agl_core.protocols import PolicySpec
from agl_torch.batching import ACTIVATIONS_ON_CPU, TOKENS_ON_CPU, activation_bytes, recompute_layers, tokens_per_pass
from agl_torch.loading import LoadedModel
from agl_torch.process import Policies, Policy

from .conftest import CPU, LORA, Shape, load, make_checkpoint, start_policies, update, weights_of

ADAM = {"learning_rate": 1e-2, "weight_decay": 0.1}
GRPO: dict[str, Any] = {"algorithm": "grpo", "algorithm_options": {"beta": 0.1}}


def start_one(checkpoint: Path, **options: Any) -> tuple[Policies, Policy]:
    policies = start_policies(options, default=PolicySpec(str(checkpoint)))
    return policies, policies.policies["default"]


def test_a_tiny_model_samples_on_one_thread_and_trains_on_all(checkpoint: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        policies, policy = start_one(checkpoint)
        assert torch.get_num_threads() == 1
        seen: set[int] = set()
        policy.loaded.model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
        update(policies)
        assert seen == {3}
        assert torch.get_num_threads() == 1
        start_one(checkpoint, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_pass_has_as_many_tokens_as_its_memory_allows(tmp_path: Path) -> None:
    """Checked against what torch itself keeps: the bytes that a backward pass frees."""
    model, device = load(make_checkpoint(tmp_path / "four", Shape(layers=4))).model, CPU
    ids = torch.randint(3, 300, (4, 64))

    def kept() -> int:
        seen: dict[int, torch.Tensor] = {}
        weights = {p.data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            model.model(input_ids=ids, use_cache=False)
        return sum(t.nbytes for at, t in seen.items() if at not in weights)

    plain = activation_bytes(model, device)
    assert plain == pytest.approx(kept() / ids.numel(), rel=0.3)
    assert tokens_per_pass(model, device) == min(TOKENS_ON_CPU, int(ACTIVATIONS_ON_CPU / plain))
    recompute_layers(model)
    assert activation_bytes(model, device) < 0.5 * plain
    assert not model.training


def test_a_cache_that_holds_no_reply_is_refused_by_the_names_of_its_settings(tmp_path: Path) -> None:
    # 8 layers of 256 tokens of 2 x 128 floats: 2 MB for one reply.
    wide = make_checkpoint(tmp_path / "wide", Shape(layers=8, hidden=256))
    with pytest.raises(EngineError, match=r"engine\.torch\.cache_mib, or lower engine\.torch\.max_context"):
        start_one(wide, cache_mib=1)


def test_an_update_has_the_memory_of_the_cache(checkpoint: Path) -> None:
    policies, policy = start_one(checkpoint)
    sampler = policy.sampler
    held = {sampler.cache_nbytes}
    policy.loaded.model.register_forward_pre_hook(lambda *_: held.add(sampler.cache_nbytes))
    update(policies)
    assert 0 in held
    assert sampler.cache_nbytes == max(held) > 0
    sampler.submit(Request("a", np.array([5, 6, 7], dtype=np.int32), max_tokens=4))
    [reply] = [done for _ in range(9) for done in sampler.step()]
    assert reply.version == 1


def test_a_failed_update_that_moved_weights_makes_a_version(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies, policy = start_one(checkpoint)
    before = weights_of(policy.loaded.model)
    step = policy.trainer.optimizer.step

    def fail_after(*_: Any) -> Any:
        step()
        raise MemoryError("too little")

    monkeypatch.setattr(policy.trainer.optimizer, "step", fail_after)
    with pytest.raises(MemoryError):
        update(policies)
    after = weights_of(policy.loaded.model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert policies.versions == {"default": 1}


@pytest.mark.parametrize(("lora", "times"), [(None, 1), (LORA, 10)])
def test_a_step_size_that_is_left_out_follows_from_the_model(
    checkpoint: Path, lora: dict[str, Any] | None, times: int
) -> None:
    trainer = start_policies(default=PolicySpec(str(checkpoint), lora=lora)).policies["default"].trainer
    assert trainer.optimizer.learning_rate == pytest.approx(times * LARGEST)  # a toy's is the largest there is


def base_tensors(loaded: LoadedModel) -> dict[str, int]:
    """Where each tensor of the base lies in memory."""
    return {
        name.replace("base_layer.", ""): parameter.data_ptr()
        for name, parameter in loaded.model.get_base_model().named_parameters()
        if "lora" not in name
    }


def adapters(loaded: LoadedModel) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in loaded.model.named_parameters() if "lora" in name}


@torch.no_grad()
def logits(policy: Policy) -> torch.Tensor:
    return policy.loaded.model(torch.tensor([[5, 6, 7, 8]])).logits


def test_adapters_on_one_base_share_its_tensors_and_nothing_else_their_critics_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    from_pretrained = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda name, **more: loads.append(name) or from_pretrained(name, **more),
    )
    specs = {
        "writer": PolicySpec(str(checkpoint), optimizer=ADAM, lora=LORA, algorithm="ppo"),
        "critic": PolicySpec(str(checkpoint), optimizer=ADAM, lora=LORA | {"rank": 2}, **GRPO),
    }
    policies = start_policies(**specs)
    writer, critic = (policies.policies[name].loaded for name in specs)
    assert len(base_tensors(writer)) > 20
    assert base_tensors(writer) == base_tensors(critic)
    assert set(adapters(writer).values()).isdisjoint(adapters(critic).values())
    for name, weight in (*writer.model.named_parameters(), *critic.model.named_parameters()):
        assert weight.requires_grad == ("lora" in name)

    update(policies, "writer")
    update(policies, "critic")
    assert loads == [str(checkpoint)]
    plain = from_pretrained(checkpoint)(torch.tensor([[5, 6, 7, 8]])).logits
    for policy in policies.policies.values():
        assert not torch.equal(logits(policy), plain)
        with policy.loaded.model.disable_adapter():
            assert torch.equal(logits(policy), plain)


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"lora": LORA}], ids=["bfloat16", "lora"])
def test_a_policy_that_is_not_updated_stays_bit_identical_with_adam_and_weight_decay(
    checkpoint: Path, kind: dict[str, Any]
) -> None:
    spec = PolicySpec(str(checkpoint), optimizer=ADAM, **GRPO, **kind)
    policies = start_policies(writer=spec, critic=spec)
    for name in ("writer", "critic"):
        update(policies, name)  # From now on both have momentum, which would move them without a gradient.
    before = {name: weights_of(policy.loaded.model) for name, policy in policies.policies.items()}
    for seed in (1, 2, 3):
        update(policies, "writer", seed)
    after = {name: weights_of(policy.loaded.model) for name, policy in policies.policies.items()}

    assert all(torch.equal(before["critic"][name], after["critic"][name]) for name in before["critic"])
    moved = [name for name in before["writer"] if not torch.equal(before["writer"][name], after["writer"][name])]
    assert len(moved) > 10
    assert policies.versions == {"writer": 4, "critic": 1}
