"""Checkpoints as they are found and as they are saved: training goes on bit for bit, what does not fit is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from tiny_tokenizers import TEXTS
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agl_chat.backends import Request
from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import PolicySpec
from agl_torch.loading import LoadedModel, fingerprint
from agl_torch.process import Policies
from agl_torch.sampler import Sampler

from .conftest import (
    LORA,
    SMALL,
    Loaded,
    Shape,
    all_logprobs,
    load,
    make_batch,
    make_checkpoint,
    saved,
    start_policies,
    trainer_of,
    untrained,
    update,
    weights_of,
)


@pytest.mark.parametrize(
    ("architecture", "tied", "sharded", "dtype"),
    [
        (architecture, tied, sharded, torch.bfloat16 if sharded else torch.float32)
        for architecture, tied, sharded in itertools.product(["qwen2", "llama"], [True, False], [True, False])
    ],
)
def test_checkpoint_formats(tmp_path: Path, architecture: str, tied: bool, sharded: bool, dtype: torch.dtype) -> None:
    ends = ("<|im_end|>", "<|endoftext|>") if architecture == "qwen2" else ("<|eot_id|>", "<|end_of_text|>")
    folder = make_checkpoint(tmp_path / "model", Shape(architecture, tied, dtype, sharded, ends))
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    loaded = load(folder, dtype=str(dtype).removeprefix("torch."))
    assert loaded.dtype == dtype
    assert loaded.context_length == 256
    assert loaded.eos_ids == {loaded.tokenizer.convert_tokens_to_ids(end) for end in ends}
    embedding, head = loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) == tied
    ids = torch.tensor([[5, 6, 7]])
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.model(ids).logits, plain(ids).logits)
    assert not loaded.model.training


def test_positions_that_depend_on_the_length_end_the_context_where_they_change(tmp_path: Path) -> None:
    """With LongRoPE, the longest row of a pass decides about the frequencies of all."""
    folder = make_checkpoint(tmp_path / "model")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    shape = {"vocab_size": 320, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    changes = {"original_max_position_embeddings": 32, "initializer_range": 0.15, "rope_parameters": rope}
    untrained("phi3", **shape, **changes).save_pretrained(folder)
    loaded = load(folder)
    sampler = Sampler(loaded)
    for length in (5, 20, 30):
        prompt = np.arange(3, 3 + length, dtype=np.int32)
        sampler.submit(Request(str(length), prompt, max_tokens=min(30, loaded.context_length - length)))
    while not sampler.idle:
        for done in sampler.step():
            [response] = done.responses
            ids = torch.tensor([*done.request.prompt_ids, *response.ids])[None].long()
            logits = torch.cat([loaded.model(input_ids=ids[:, :end]).logits[0, -1:] for end in range(1, ids.shape[1])])
            plain = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[-len(response.ids) :, 0]
            np.testing.assert_allclose(response.logprobs, plain.detach().numpy(), atol=1e-4)
    assert loaded.context_length == 32


def test_a_tokenizer_class_of_the_model_type_does_not_win(tmp_path: Path) -> None:
    # What hand-made checkpoints say when they were saved with the architecture's class name.
    folder = make_checkpoint(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    text = config.read_text()
    assert '"tokenizer_class"' in text
    config.write_text(re.sub(r'"tokenizer_class": "\w+"', '"tokenizer_class": "Qwen2Tokenizer"', text))
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXTS[0]).ids
    assert load(folder).tokenizer.encode(TEXTS[0], add_special_tokens=False) == expected


def test_a_saved_tokenizer_has_the_settings_of_its_model(tmp_path: Path) -> None:
    """As transformers 4 wrote them, which it can read; it cannot read those that transformers 5 writes."""
    folder = make_checkpoint(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    eos = json.loads(config.read_text())["eos_token"]
    config.write_text(json.dumps({"eos_token": eos, "extra_special_tokens": {}, "tokenizer_class": "Qwen2Tokenizer"}))
    _, model = saved(tmp_path / "saved", PolicySpec(str(folder)))
    assert (model / "tokenizer_config.json").read_text() == config.read_text()


@pytest.mark.parametrize(
    ("instructions", "dtype"),
    [({"amx_bf16": True}, torch.bfloat16), ({"amx_bf16": False, "avx512_f": True}, torch.float32), ({}, torch.float32)],
    ids=["with", "without", "unknown"],
)
def test_bfloat16_is_kept_where_the_processor_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    folder = make_checkpoint(tmp_path / "model", Shape(dtype=torch.bfloat16))
    assert load(folder).dtype == dtype
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_lora_starts_as_the_model_and_each_time_alike(checkpoint: Path, loaded: LoadedModel) -> None:
    adapted = load(checkpoint, lora=LORA)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(adapted.model(ids).logits, loaded.model(ids).logits)
    again = load(checkpoint, lora=LORA)
    assert all(torch.equal(a, b) for a, b in zip(adapted.model.parameters(), again.model.parameters(), strict=True))


def test_lora_targets_that_do_not_exist_are_named(checkpoint: Path) -> None:
    with pytest.raises(EngineError, match=r"targets is query.*q_proj"):
        load(checkpoint, lora=LORA | {"targets": ["query"]})


@pytest.mark.parametrize("name", ["./nowhere", "nobody/no-such-model", str(Path(__file__).parent)])
def test_what_is_no_model_is_an_error_with_what_to_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match=r"cannot be loaded: .* Give the folder of a causal LM"):
        load(name)


class TestErrors:
    def test_no_chat_template(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError, match="no chat template"):
            load(make_checkpoint(tmp_path / "m", template=None))

    def test_a_tokenizer_of_another_model(self, tmp_path: Path, checkpoint: Path) -> None:
        folder = make_checkpoint(tmp_path / "m")
        tokenizer = load(checkpoint).tokenizer
        tokenizer.add_tokens([f"<extra{i}>" for i in range(5)])
        tokenizer.save_pretrained(folder)
        with pytest.raises(EngineError, match="do not belong together"):
            load(folder)

    def test_incomplete_weights(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        folder = make_checkpoint(tmp_path / "m")
        weights = load_file(folder / "model.safetensors")
        weights.pop("model.norm.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EngineError, match=r"incomplete: model\.norm\.weight"):
            load(folder)


LOCAL = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 16}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}


class Deaf(LlamaForCausalLM):
    """Takes no mask from outside: a padded row sees its pads."""

    def forward(self, *args, attention_mask=None, **kwargs):
        return super().forward(*args, **kwargs)


GEMMA = {"sliding_window": 16, "head_dim": 8}
GEMMA_4 = {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 16}),
        ("gemma4_text", {**GEMMA, **GEMMA_4, "global_head_dim": 8, "num_kv_shared_layers": 0}),
    ],
)
def test_a_model_with_a_short_window_is_refused(qwen: Loaded, kind: str, changes: dict[str, Any]) -> None:
    model = untrained(kind, **changes)
    with pytest.raises(EngineError, match=r"sliding window of 16.*engine\.torch\.max_context to at most 16"):
        Sampler(replace(qwen, model=model, context_length=64))
    Sampler(replace(qwen, model=model, context_length=16))


def test_scores_are_capped_in_serving_and_training(checkpoint: Path, tmp_path: Path) -> None:
    """As Gemma 2 caps them, which torch's own attention does not."""
    shutil.copytree(checkpoint, tmp_path / "m")
    changes = GEMMA | {"vocab_size": 320, "attn_logit_softcapping": 0.5, "sliding_window": 64}
    untrained("gemma2", **changes).save_pretrained(tmp_path / "m")
    loaded, batch = load(tmp_path / "m"), make_batch(None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    np.testing.assert_allclose(trainer_of(loaded).logprobs(batch).logprobs_R, all_logprobs(plain, batch), atol=1e-5)
    Sampler(loaded)


CACHE, WINDOWS = "does not run with the sampler's cache and mask", "only full attention"


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("falcon", {"alibi": True}, CACHE),
        ("bloom", {}, CACHE),
        ("falcon_h1", MAMBA, WINDOWS),
        ("jamba", {"num_experts": 2, "use_mamba_kernels": False}, WINDOWS),
        ("gpt_neo", LOCAL, "from that of the model's own forward pass"),
        ("deaf", {}, "from that of the model's own forward pass"),
    ],
)
def test_a_model_that_cannot_be_sampled_exactly_is_refused_at_the_start(
    qwen: Loaded, kind: str, changes: dict[str, Any], reason: str
) -> None:
    model = Deaf(LlamaConfig(**SMALL)).eval() if kind == "deaf" else untrained(kind, **changes)
    with pytest.raises(EngineError, match=reason):
        Sampler(replace(qwen, model=model, context_length=64))


ADAM = {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 5}
GRPO = {"algorithm": "grpo", "algorithm_options": {"beta": 0.1, "epochs": 2, "minibatches": 2}}
CRITIC = {"critic_learning_rate": 1e-2, "minibatches": 2, "critic_epochs": 2}
PPO = {"algorithm": "ppo", "algorithm_options": CRITIC}
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "algorithm": "reinforce++"},
    "lora": {"lora": LORA, **GRPO},
    "bfloat16-lora": {"dtype": "bfloat16", "lora": LORA, **PPO},
    "float32": PPO,
}
"""Policies, and what they are trained by."""


def spec(checkpoint: Path, **more: Any) -> PolicySpec:
    return PolicySpec(str(checkpoint), optimizer=ADAM, **more)


def train(policies: Policies, seed: int) -> list[dict[str, float]]:
    """One update of each policy; its metrics without seconds."""
    steps = []
    for name in policies.policies:
        metrics = update(policies, name, seed).metrics
        steps.append({key: value for key, value in metrics.items() if "seconds" not in key})
    return steps


def everything(policies: Policies) -> dict[str, Any]:
    """Weights, optimizers and random states."""
    return {name: [weights_of(p.loaded.model), p.trainer.state_dict()] for name, p in policies.policies.items()}


def test_training_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    specs = {name: spec(checkpoint, **settings) for name, settings in KINDS.items()}
    policies = start_policies(**specs)
    train(policies, seed=0)
    policies.save(tmp_path)
    metrics = train(policies, seed=1)

    again = start_policies(**specs)
    train(again, seed=2)  # What it did before must not show.
    again.load(tmp_path)
    assert again.versions == dict.fromkeys(KINDS, 1)
    assert train(again, seed=1) == metrics
    torch.testing.assert_close(everything(again), everything(policies), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [Shape(), Shape("llama", tied=False, eos=("<|eot_id|>",))], ids=["qwen2", "llama"])
def test_a_checkpoint_is_a_hugging_face_model(tmp_path: Path, shape: Shape) -> None:
    loaded, folder = saved(tmp_path, spec(make_checkpoint(tmp_path / "source", shape)))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, loaded.model(ids).logits)
    # And a policy to start from, that encodes as the first one did.
    again = load(folder)
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


OUTER = LORA | {"targets": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_merged_as_the_page_says_is_what_was_trained(tmp_path: Path, tied: bool) -> None:
    source = make_checkpoint(tmp_path / "source", Shape(tied=tied))
    if tied:
        with pytest.raises(EngineError, match=r"names embed_tokens, lm_head, and .* share their weights"):
            load(source, lora=OUTER)
    loaded, folder = saved(tmp_path, spec(source, lora=LORA if tied else OUTER), updates=3)
    AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 300)[None, :200]
    merged, plain = (AutoModelForCausalLM.from_pretrained(at)(ids).logits for at in (tmp_path / "merged", source))
    torch.testing.assert_close(merged, loaded.model(ids).logits, rtol=0, atol=1e-5)
    assert abs(merged - plain).max() > 0.1


def test_adapters_know_the_weights_they_belong_to(checkpoint: Path, tmp_path: Path) -> None:
    _, adapter = saved(tmp_path / "adapter", spec(checkpoint, lora=LORA))
    _, full = saved(tmp_path / "full", spec(checkpoint))
    of_base = [{}, {"lora": LORA}, {"adapter": str(adapter)}, {"dtype": "bfloat16"}]
    prints = {fingerprint(load(checkpoint, **more).model) for more in of_base}
    assert len(prints) == 1, "of the weights below an adapter alone, in any dtype"
    assert fingerprint(load(full).model) not in prints

    with pytest.raises(EngineError, match=r"trained on other weights than those of 'full'.*fingerprints differ"):
        load(full, adapter=str(adapter), name="full")
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        start_policies(default=PolicySpec(str(full), lora=LORA)).load(tmp_path / "adapter")


def test_a_checkpoint_of_other_settings_and_a_truncated_one_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for name, other in (("lora", {"lora": LORA}), ("bfloat16", {"dtype": "bfloat16"}), ("cut", {}), ("short", {})):
        saved(tmp_path / name, spec(checkpoint, **other))
    for file in (tmp_path / "cut/default/trainer.pt", tmp_path / "short/default/model/model.safetensors"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for name in ("lora", "bfloat16", "cut", "short"):
        with pytest.raises(CheckpointError, match="dtype and lora settings that it was saved with"):
            start_policies(default=spec(checkpoint)).load(tmp_path / name)
