"""Saved policies: training goes on bit for bit, others load them as models of their own, and what does not fit is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import PolicySpec
from agl_core.training.child import UpdateRequest
from agl_torch.loading import fingerprint, load_model
from agl_torch.process import Policies

from .conftest import LORA, TEXTS, Shape, make_batch, make_checkpoint, saved, start_policies, weights_of

CPU = torch.device("cpu")
ADAM = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 5}
GRPO: tuple[str, dict[str, Any]] = ("grpo", {"beta": 0.1, "epochs": 2, "minibatches": 2})
PPO: tuple[str, dict[str, Any]] = ("ppo", {"critic_learning_rate": 1e-2, "minibatches": 2, "critic_epochs": 2})
KINDS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "float32": ({}, GRPO),
    "bfloat16": ({"dtype": "bfloat16"}, ("reinforce++", {})),
    "lora": ({"lora": LORA}, GRPO),
    "bfloat16-lora": ({"dtype": "bfloat16", "lora": LORA}, PPO),
    "critic": ({}, PPO),
}
"""Policies, and what they are trained by."""


def spec(checkpoint: Path, **more: Any) -> PolicySpec:
    return PolicySpec(str(checkpoint), optimizer=ADAM, **more)


def train(policies: Policies, seed: int) -> list[dict[str, float]]:
    """One update of each policy; its metrics without seconds."""
    found = []
    for name in policies.policies:
        algorithm, options = KINDS[name][1]
        request = UpdateRequest(name, algorithm, options, make_batch(None, seed=seed))
        metrics = policies.update(request, lambda _: None).metrics
        found.append({key: value for key, value in metrics.items() if "seconds" not in key})
    return found


def everything(policies: Policies) -> list[torch.Tensor]:
    """Of weights, optimizers and random states."""

    def flattened(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value.detach().clone()]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return [tensor for item in value for tensor in flattened(item)]
        return [torch.tensor(float(value))] if isinstance(value, int | float) else []

    return flattened([[weights_of(p.loaded.model), p.trainer.state_dict()] for p in policies.policies.values()])


def test_training_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    specs = {name: spec(checkpoint, **settings) for name, (settings, _) in KINDS.items()}
    policies = start_policies(**specs)
    train(policies, seed=0)
    policies.save(tmp_path)
    metrics = train(policies, seed=1)

    again = start_policies(**specs)
    train(again, seed=2)  # What it did before must not show.
    again.restore(tmp_path)
    assert again.versions == dict.fromkeys(KINDS, 1)
    assert train(again, seed=1) == metrics
    expected, found = everything(policies), everything(again)
    assert len(expected) == len(found) > 200
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [Shape(), Shape("llama", tied=False, eos=("<|eot_id|>",))], ids=["qwen2", "llama"])
def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path, shape: Shape) -> None:
    loaded, folder = saved(tmp_path, spec(make_checkpoint(tmp_path / "source", shape)))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, loaded.model(ids).logits)
    # And a policy to start from, that encodes as the first one did.
    again = load_model(PolicySpec(str(folder)), CPU, seed=0)
    assert again.eos_ids == loaded.eos_ids
    messages = [{"role": "user", "content": text} for text in TEXTS]
    one, other = (
        (tokenizer(TEXTS)["input_ids"], tokenizer.apply_chat_template(messages, tokenize=False))
        for tokenizer in (again.tokenizer, loaded.tokenizer)
    )
    assert one == other


@pytest.mark.filterwarnings("error::UserWarning")  # peft warns when it cannot look the base up, which it need not.
def test_a_lora_checkpoint_is_a_peft_adapter_that_names_its_base_as_the_configuration_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    loaded, folder = saved(tmp_path, spec(checkpoint, lora=LORA, name="someone/a-base"))
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/a-base"
    assert [file.name for file in folder.iterdir() if str(checkpoint).encode() in file.read_bytes()] == []
    assert not (folder / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.tensor([[5, 6, 7]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, folder)(ids).logits
    assert torch.equal(adapted, loaded.model(ids).logits)
    assert not torch.equal(adapted, plain)


def test_adapters_know_the_weights_they_belong_to(checkpoint: Path, tmp_path: Path) -> None:
    _, adapter = saved(tmp_path / "adapter", spec(checkpoint, lora=LORA))
    _, full = saved(tmp_path / "full", spec(checkpoint))
    of_base = [{}, {"lora": LORA}, {"adapter": str(adapter)}, {"dtype": "bfloat16"}]
    prints = {fingerprint(load_model(PolicySpec(str(checkpoint), **more), CPU, 0).model) for more in of_base}
    assert len(prints) == 1, "of the weights below an adapter alone, in any dtype"
    assert fingerprint(load_model(PolicySpec(str(full)), CPU, 0).model) not in prints

    other = PolicySpec(str(full), adapter=str(adapter), name="full")
    with pytest.raises(EngineError, match=r"trained on other weights than those of 'full'.*fingerprints differ"):
        load_model(other, CPU, 0)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        start_policies(default=PolicySpec(str(full), lora=LORA)).restore(tmp_path / "adapter")


def test_a_checkpoint_of_other_settings_and_a_truncated_one_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for name, other in (("lora", {"lora": LORA}), ("bfloat16", {"dtype": "bfloat16"}), ("cut", {}), ("short", {})):
        saved(tmp_path / name, spec(checkpoint, **other))
    for file in (tmp_path / "cut/default/trainer.pt", tmp_path / "short/default/model/model.safetensors"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for name in ("lora", "bfloat16", "cut", "short"):
        with pytest.raises(CheckpointError, match="dtype and lora settings that it was saved with"):
            start_policies(default=spec(checkpoint)).restore(tmp_path / name)
