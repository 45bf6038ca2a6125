"""Several policies in one engine: what they share, and that training one touches no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from agl_core.protocols import EngineContext, PolicySpec
from agl_core.training.child import UpdateRequest
from agl_torch.loading import LoadedModel
from agl_torch.plugin import TorchOptions
from agl_torch.process import Policies, Policy

from .conftest import LORA, make_batch, weights_of

IDS = torch.tensor([[5, 6, 7, 8]])
ADAM = {"learning_rate": 1e-2, "weight_decay": 0.1}
GRPO: dict[str, Any] = {"beta": 0.1}


def load(seed: int = 0, **policies: PolicySpec) -> Policies:
    context = EngineContext(Path("run"), seed, policies, False, (), "key")
    return Policies(TorchOptions(cache_mib=16, device="cpu"), context)


def spec(checkpoint: Path, **more: Any) -> PolicySpec:
    return PolicySpec(str(checkpoint), optimizer=ADAM, **more)


def update(
    policies: Policies, name: str, seed: int = 0, algorithm: str = "grpo", options: dict[str, Any] = GRPO
) -> dict[str, float]:
    request = UpdateRequest(name, algorithm, options, make_batch(None, seed=seed))
    shares: list[float] = []
    metrics = dict(policies.update(request, shares.append).metrics)
    assert orjson.loads(orjson.dumps(shares))[-1] == 1.0  # It is sent so.
    return metrics


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
    found: torch.Tensor = policy.loaded.model(IDS).logits
    return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded from disk."""
    found: list[Any] = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def noting(name: str, **options: Any) -> Any:
        found.append(name)
        return from_pretrained(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    return found


class TestSharedBases:
    def test_adapters_on_one_base_share_its_tensors_and_nothing_else(self, checkpoint: Path) -> None:
        policies = load(writer=spec(checkpoint, lora=LORA), critic=spec(checkpoint, lora=LORA | {"rank": 2})).policies
        writer, critic = policies["writer"].loaded, policies["critic"].loaded

        assert len(base_tensors(writer)) > 20
        assert base_tensors(writer) == base_tensors(critic)
        assert set(adapters(writer).values()).isdisjoint(adapters(critic).values())
        assert not any(p.requires_grad for name, p in writer.model.named_parameters() if "lora" not in name)
        assert all(p.requires_grad for name, p in writer.model.named_parameters() if "lora" in name)

    def test_training_one_leaves_the_other_and_the_base_as_they_were(self, checkpoint: Path) -> None:
        policies = load(writer=spec(checkpoint, lora=LORA), critic=spec(checkpoint, lora=LORA))
        update(policies, "critic")
        before = {name: logits(policy) for name, policy in policies.policies.items()}
        for seed in (1, 2):
            update(policies, "writer", seed)

        assert torch.equal(logits(policies.policies["critic"]), before["critic"])
        assert not torch.equal(logits(policies.policies["writer"]), before["writer"])
        assert policies.versions == {"writer": 2, "critic": 1}
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)(IDS).logits
        for policy in policies.policies.values():
            with policy.loaded.model.disable_adapter():
                assert torch.equal(logits(policy), plain)
            assert not torch.equal(logits(policy), plain)

    def test_the_critic_of_an_adapter_is_another_adapter_on_the_same_base(
        self, checkpoint: Path, loads: list[Any]
    ) -> None:
        policies = load(writer=spec(checkpoint, lora=LORA))
        update(policies, "writer", algorithm="ppo", options={})
        assert len(loads) == 1
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)(IDS).logits
        with policies.policies["writer"].loaded.model.disable_adapter():
            assert torch.equal(logits(policies.policies["writer"]), plain)


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"lora": LORA}], ids=["bfloat16", "lora"])
def test_a_policy_that_is_not_updated_stays_bit_identical_with_adam_and_weight_decay(
    checkpoint: Path, kind: dict[str, Any]
) -> None:
    policies = load(writer=spec(checkpoint, **kind), critic=spec(checkpoint, **kind))
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


def test_several_policies_go_on_bit_for_bit_from_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    specs = {"whole": spec(checkpoint), "writer": spec(checkpoint, lora=LORA), "critic": spec(checkpoint, lora=LORA)}

    def train(policies: Policies, seeds: range) -> None:
        for seed in seeds:
            update(policies, "whole", seed, "reinforce++", {})
            update(policies, "writer", seed, "ppo", {})
            update(policies, "critic", seed)

    first = load(**specs)
    train(first, range(2))
    first.save(tmp_path)
    train(first, range(2, 4))

    again = load(seed=9, **specs)
    again.restore(tmp_path)
    assert again.versions == {"whole": 2, "writer": 2, "critic": 2}
    train(again, range(2, 4))
    for name in specs:
        expected, found = (weights_of(each.policies[name].loaded.model) for each in (first, again))
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert base_tensors(again.policies["writer"].loaded) == base_tensors(again.policies["critic"].loaded)
