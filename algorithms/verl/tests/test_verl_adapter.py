"""veRL's export of a LoRA policy becomes an adapter that peft, transformers and the torch engine read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_core.config.sections import LoraSection
from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import PolicySpec
from agl_torch.loading import load_model
from agl_verl.checkpoint import finish, shards

POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
SPEC = PolicySpec(str(POLICY), "float32", lora=LORA.model_dump())
TOKENS = torch.arange(20)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


@pytest.fixture
def trained() -> Any:
    """A policy whose adapter has an effect, as veRL makes it."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA.targets), bias="none", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return adapted


@pytest.fixture
def checkpoint(trained: Any, tmp_path: Path) -> Path:
    """After veRL wrote its files, and agl finished them. veRL saves peft's weights by a plain model's own method."""
    exported = shards(tmp_path) / "actor" / "huggingface"
    plain = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    plain.save_pretrained(exported, state_dict=trained.state_dict())
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(exported)
    finish(tmp_path, SPEC, version=1, workers=1, critic=False)
    return tmp_path


def test_peft_and_the_torch_engine_load_the_adapter(trained: Any, checkpoint: Path) -> None:
    adapter, expected = checkpoint / "model", logits(trained)
    base = logits(AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32))
    assert not torch.allclose(base, expected, atol=0.1), "the adapter has an effect"
    by_peft = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    torch.testing.assert_close(logits(by_peft), expected)
    spec = PolicySpec(str(POLICY), "float32", adapter=str(adapter))
    torch.testing.assert_close(logits(load_model(spec, torch.device("cpu"), 0).model), expected, rtol=1e-4, atol=1e-4)
    assert (adapter / "tokenizer.json").is_file()
    assert not (adapter / "config.json").exists(), "it would be taken for a whole model"


def test_an_adapter_belongs_to_the_weights_that_it_was_trained_on(checkpoint: Path, tmp_path: Path) -> None:
    assert (checkpoint / "model" / "agl_base.json").is_file()
    other = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(tmp_path / "other")
    spec = PolicySpec(str(tmp_path / "other"), "float32", adapter=str(checkpoint / "model"))
    with pytest.raises(EngineError, match="trained on other weights"):
        load_model(spec, torch.device("cpu"), 0)


def test_verls_misnamed_weights_do_not_stay_beside_its_shards(checkpoint: Path) -> None:
    beside = {file.name for file in (shards(checkpoint) / "actor" / "huggingface").iterdir()}
    assert "config.json" in beside, "veRL reads the configuration there"
    assert not [name for name in beside if name.endswith(".safetensors")]


def test_an_export_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    exported = shards(tmp_path) / "actor" / "huggingface"
    AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).save_pretrained(exported)
    with pytest.raises(CheckpointError, match="no LoRA weights"):
        finish(tmp_path, SPEC, version=1, workers=1, critic=False)
