"""Saving and loading: exact continuation, formats others can read, nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agl_algorithms.grpo import Grpo
from agl_algorithms.interface import Algorithm
from agl_algorithms.plugin import GrpoOptions, PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.config.sections import OptimizerSection
from agl_core.errors import CheckpointError
from agl_core.protocols import PolicySpec
from agl_torch.loading import Bases, LoadedModel, load_model, load_policy, save_policy
from agl_torch.training.trainer import PolicyTrainer

from .conftest import LORA, TEXTS, Shape, make_batch, make_checkpoint, weights_of

CPU = torch.device("cpu")
SETTINGS = OptimizerSection(learning_rate=1e-2, weight_decay=0.1, warmup_steps=5)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": LORA},
    "bfloat16-lora": {"dtype": "bfloat16", "lora": LORA},
}


def start(checkpoint: Path, seed: int = 0, **settings: Any) -> tuple[LoadedModel, PolicyTrainer]:
    loaded = load_model(PolicySpec(str(checkpoint), **settings), CPU, seed)
    initial = PolicySpec(str(checkpoint), **settings)
    trainer = PolicyTrainer(
        loaded, SETTINGS, tokens_per_micro_batch=200, initial=lambda: load_model(initial, CPU, seed)
    )
    return loaded, trainer


def flattened(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flattened(item)]
    return [torch.tensor(float(value))] if isinstance(value, int | float) else []


def everything(loaded: LoadedModel, trainer: PolicyTrainer) -> list[torch.Tensor]:
    return flattened([weights_of(loaded.model), trainer.state_dict()])


def without_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "seconds" not in name}


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Grpo(GrpoOptions(beta=0.1, epochs=2, minibatches=2)),
    "ppo": Ppo(PpoOptions(critic_learning_rate=1e-2, epochs=2, minibatches=2, critic_epochs=2)),
}


@pytest.mark.parametrize(
    ("algorithm", "kind"), [*(("grpo", kind) for kind in KINDS), ("ppo", "float32"), ("ppo", "bfloat16-lora")]
)
def test_training_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path, algorithm: str, kind: str) -> None:
    batches = [make_batch(None, seed=i) for i in range(3)]
    torch.manual_seed(1)
    loaded, trainer = start(checkpoint, **KINDS[kind])
    trainer.update(batches[0], ALGORITHMS[algorithm])
    save_policy(tmp_path / "p", loaded, trainer)
    metrics = trainer.update(batches[1], ALGORITHMS[algorithm]).metrics
    expected = everything(loaded, trainer)

    torch.manual_seed(2)
    again, resumed = start(checkpoint, seed=99, **KINDS[kind])
    resumed.update(batches[2], ALGORITHMS[algorithm])  # What it did before must not show.
    load_policy(tmp_path / "p", again, resumed)
    assert resumed.version == 1
    found = resumed.update(batches[1], ALGORITHMS[algorithm]).metrics
    assert without_seconds(found) == without_seconds(metrics)
    state = everything(again, resumed)
    assert len(state) == len(expected) > 20
    assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))


@pytest.mark.parametrize("shape", [Shape(), Shape("llama", tied=False, eos=("<|eot_id|>",))], ids=["qwen2", "llama"])
def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path, shape: Shape) -> None:
    source = make_checkpoint(tmp_path / "source", shape)
    loaded, trainer = start(source)
    trainer.update(make_batch(loaded), Grpo(GrpoOptions(beta=0)))
    save_policy(tmp_path / "p", loaded, trainer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "p" / "model")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(plain(ids).logits, loaded.model(ids).logits)
    # And a policy to start from, that encodes as the first one did.
    again = load_model(PolicySpec(str(tmp_path / "p" / "model")), CPU, seed=0)
    assert again.eos_ids == loaded.eos_ids
    for text in TEXTS:
        assert again.tokenizer.encode(text) == loaded.tokenizer.encode(text)
    messages = [{"role": "user", "content": text} for text in TEXTS]
    render = {"tokenize": False, "add_generation_prompt": True}
    assert again.tokenizer.apply_chat_template(messages, **render) == loaded.tokenizer.apply_chat_template(
        messages, **render
    )


def test_a_lora_checkpoint_is_a_peft_adapter(checkpoint: Path, tmp_path: Path) -> None:
    loaded, trainer = start(checkpoint, lora=LORA)
    trainer.update(make_batch(loaded), Grpo(GrpoOptions(beta=0)))
    save_policy(tmp_path / "p", loaded, trainer)
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.tensor([[5, 6, 7]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "p" / "model")(ids).logits
    assert torch.equal(adapted, loaded.model(ids).logits)
    assert not torch.equal(adapted, plain)
    assert not (tmp_path / "p" / "model" / "model.safetensors").exists()


@pytest.mark.filterwarnings("error::UserWarning")  # peft warns when it cannot look the base up, which it need not.
def test_an_adapter_names_its_base_as_the_configuration_does(checkpoint: Path, tmp_path: Path) -> None:
    bases, names = Bases(), ("someone/a-base", "weights/mine")
    policies = [load_model(PolicySpec(str(checkpoint), lora=LORA, name=name), CPU, 0, bases) for name in names]
    for number, (loaded, name) in enumerate(zip(policies, names, strict=True)):
        _, trainer = start(checkpoint, lora=LORA)
        save_policy(tmp_path / str(number), loaded, trainer)
        model = tmp_path / str(number) / "model"
        assert json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"] == name
        assert [file.name for file in model.iterdir() if str(checkpoint).encode() in file.read_bytes()] == []


@pytest.mark.parametrize("other", [{"lora": LORA}, {"dtype": "bfloat16"}], ids=str)
def test_a_checkpoint_of_other_settings_is_refused(checkpoint: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    save_policy(tmp_path / "p", *start(checkpoint, **other))
    with pytest.raises(CheckpointError, match="dtype and lora settings that it was saved with"):
        load_policy(tmp_path / "p", *start(checkpoint))


@pytest.mark.parametrize("file", ["trainer.pt", "model/model.safetensors"])
def test_a_truncated_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, file: str) -> None:
    loaded, trainer = start(checkpoint)
    save_policy(tmp_path / "p", loaded, trainer)
    path = tmp_path / "p" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be restored"):
        load_policy(tmp_path / "p", loaded, trainer)
