"""The run's side of the engine: its rows, its checkpoints and adapters, and what it knows of errors."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_core.config.sections import LoraSection
from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import PolicySpec
from agl_core.testing.engines import Row, batch_of, engine_context
from agl_core.types import Batch
from agl_torch.loading import load_model
from agl_verl import environment
from agl_verl.checkpoint import finish, read, shards
from agl_verl.environment import check_flash_attention
from agl_verl.options import VerlOptions
from agl_verl.plugin import VerlEngine
from agl_verl.rows import gather, lay_out, row_of, spread

SPEC = PolicySpec(model="/m", algorithm="grpo", algorithm_options={"beta": 0})


def test_versions_that_were_not_tried_are_refused_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch~=2.13.0", "verl==0.9.1", 'vllm~=0.31.0; extra == "gpu"', 'no-such-vllm~=0.31.0; extra == "cpu"']
    versions = {"torch": "2.13.1+cu130", "verl": "0.9.1", "vllm": "0.31.2"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or original(name))
    environment.check_versions(cpu=False)
    versions |= {"torch": "2.14.0", "verl": "0.9.2"}
    with pytest.raises(EngineError, match=r"torch 2\.14\.0 \(tested: ~=2\.13\.0\); verl 0\.9\.2") as raised:
        environment.check_versions(cpu=True)
    assert "no-such-vllm is missing" in str(raised.value)
    assert "pip install 'agl-verl[cpu]'" in str(raised.value)


def test_a_checkpoint_has_its_weights_where_the_torch_engine_has_them(tmp_path: Path) -> None:
    written = shards(tmp_path) / "actor" / "huggingface"
    written.mkdir(parents=True)
    own = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in (*own, "model.safetensors"):
        (written / name).write_text(name)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer_config.json").write_text("the base's")
    finish(tmp_path, replace(SPEC, model=str(tmp_path / "base")), version=7, workers=2, critic=False)
    assert sorted(os.listdir(tmp_path / "model")) == sorted([*own, "model.safetensors"])
    assert (tmp_path / "model" / "tokenizer_config.json").read_text() == "the base's"
    assert sorted(os.listdir(written)) == own, "veRL reads the configuration there"
    assert read(tmp_path, workers=2, critic=False) == 7
    with pytest.raises(CheckpointError, match="2 workers, and 4"):
        read(tmp_path, workers=4, critic=False)
    with pytest.raises(CheckpointError, match="no critic"):
        read(tmp_path, workers=2, critic=True)


def test_what_megatron_reads_again_stays_where_it_wrote_it(tmp_path: Path) -> None:
    written = shards(tmp_path) / "actor" / "model" / "huggingface"
    written.mkdir(parents=True)
    (written / "model.safetensors").write_text("weights")
    for _ in range(2):
        finish(tmp_path, SPEC, version=7, workers=2, critic=False)
        assert (tmp_path / "model" / "model.safetensors").read_text() == "weights"
        assert (written / "model.safetensors").read_text() == "weights"


def test_a_checkpoint_of_another_engine_is_refused_with_the_way_to_use_its_weights(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(json.dumps({"format": 1, "model": "qwen2"}))
    with pytest.raises(CheckpointError, match=r"policies\.default\.model\.path") as raised:
        read(tmp_path, workers=1, critic=False)
    assert str(tmp_path / "model") in str(raised.value)
    with pytest.raises(CheckpointError, match="no checkpoint of the veRL engine"):
        read(tmp_path / "nothing", workers=1, critic=False)


def test_a_checkpoint_without_weights_is_an_error(tmp_path: Path) -> None:
    (shards(tmp_path) / "actor" / "huggingface").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="share"):
        finish(tmp_path, SPEC, version=1, workers=1, critic=False)


KNOWN_ERRORS = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "does not fit"),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "memory of its node"),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "does not fit"),
    (
        "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.0 GiB). Try decreasing `max_model_len`",
        "max_context, or raise",
    ),
    (
        "User-specified max_model_len (2048) is greater than the derived max_model_len (max_position_embeddings=1024 "
        "or model_max_length=None in model's config.json).",
        "max_context is longer",
    ),
    ("RuntimeError: Unsupported CPU attention configuration: head_dim=16", "dimensions"),
    ("ValueError: Checkpoint engine nccl not registered, registered backends: ['naive']", "pip install cupy"),
    ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
    ("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "was lost"),
]
"""As vLLM, Ray and veRL say them."""


@pytest.mark.parametrize(("text", "part"), KNOWN_ERRORS)
def test_known_errors_come_with_their_remedy(text: str, part: str, tmp_path: Path) -> None:
    engine = VerlEngine(VerlOptions(), engine_context(tmp_path, "/m"))
    lines = ["what came before", f"(Worker pid=7) {text}", "and what follows it"]
    for log in ([text], lines):
        assert part in (engine.remedy(log, 1) or "")


def test_flash_attention_is_looked_for_where_training_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    check_flash_attention("sdpa", critic=False)
    with pytest.raises(EngineError, match=r"flash-attn is not installed.* or set engine\.verl\.attention = 'sdpa'"):
        check_flash_attention("auto", critic=False)
    with pytest.raises(EngineError, match="a critic computes attention"):
        check_flash_attention("sdpa", critic=True)
    module = ModuleType("flash_attn")
    module.__spec__ = SimpleNamespace(name="flash_attn")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    check_flash_attention("auto", critic=True)


POLICY = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
ADAPTED = PolicySpec(str(POLICY), "float32", lora=LORA.model_dump())
TOKENS = torch.arange(20)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(TOKENS).logits
    return logits


def test_peft_and_the_torch_engine_load_the_adapter(tmp_path: Path) -> None:
    """A policy whose adapter has an effect. veRL saves peft's weights by a plain model's own method."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LORA.targets), bias="none", task_type="CAUSAL_LM")
    trained = get_peft_model(model, config)
    torch.manual_seed(0)
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    exported = shards(tmp_path) / "actor" / "huggingface"
    plain = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    plain.save_pretrained(exported, state_dict=trained.state_dict())
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(exported)

    finish(tmp_path, ADAPTED, version=1, workers=1, critic=False)

    adapter, expected = tmp_path / "model", logits(trained)
    assert not torch.allclose(logits(plain), expected, atol=0.1), "the adapter has an effect"
    by_peft = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    torch.testing.assert_close(logits(by_peft), expected)
    spec = PolicySpec(str(POLICY), "float32", adapter=str(adapter))
    torch.testing.assert_close(logits(load_model(spec, torch.device("cpu"), 0).model), expected, rtol=1e-4, atol=1e-4)
    assert (adapter / "tokenizer.json").is_file()
    assert (adapter / "agl_base.json").is_file(), "the engine compared the base with it"
    assert not (adapter / "config.json").exists(), "it would be taken for a whole model"
    beside = {file.name for file in exported.iterdir()}
    assert "config.json" in beside, "veRL reads the configuration there"
    assert not [name for name in beside if name.endswith(".safetensors")], "veRL's misnamed weights"


def test_an_export_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    exported = shards(tmp_path) / "actor" / "huggingface"
    AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).save_pretrained(exported)
    with pytest.raises(CheckpointError, match="no LoRA weights"):
        finish(tmp_path, ADAPTED, version=1, workers=1, critic=False)


def recorded(*lengths: tuple[int, int]) -> Batch:
    """Transitions with these prompt and response lengths, all tokens different."""
    tokens = itertools.count()

    def take(count: int) -> list[int]:
        return list(itertools.islice(tokens, count))

    rows = [Row(take(prompt), take(response), [], n + 0.5) for n, (prompt, response) in enumerate(lengths)]
    batch = batch_of(rows)
    return replace(batch, behaviour_logprobs_R=-np.arange(1, len(batch.mask_R) + 1, dtype=np.float32))


def test_a_row_is_what_was_recorded() -> None:
    batch = replace(
        recorded((2, 3), (4, 1)),
        rollout_N=np.array([4, 7]),
        group_N=np.array([2, 3]),
        mask_R=np.array([True, False, True, True]),
    )
    row = row_of(batch, np.array([0]))
    assert row["prompts"].tolist() == [0, 1]
    assert row["responses"].tolist() == [2, 3, 4]
    assert row["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert row["response_mask"].tolist() == [1, 0, 1]
    assert row["rollout_log_probs"].tolist() == [-1, 0, -3], "what is recorded for a forced token means nothing"


def test_calls_that_continue_each_other_are_one_row() -> None:
    calls = [Row([1], [2, 3], [-1, -2], 0.5), Row([1, 2, 3, 4, 5], [6], [-3], 1.5)]
    batch = replace(batch_of(calls), mask_R=np.array([True, False, True]), turn_N=np.array([0, 1]))
    row = row_of(batch, np.array([0, 1]))
    assert row["prompts"].tolist() == [1]
    assert row["responses"].tolist() == [2, 3, 4, 5, 6]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert row["response_mask"].tolist() == [1, 0, 0, 0, 1]
    assert row["rollout_log_probs"].tolist() == [-1, 0, 0, 0, -3]
    assert spread(batch, torch.tensor([0, 0, 1]), [np.array([0, 1])], between=-1)[0].tolist() == [0, 0, -1, -1, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12), st.data())
def test_what_is_spread_over_rows_is_gathered_again(calls: list[tuple[int, int]], data: st.DataObject) -> None:
    """Calls of one conversation, each with some news before its response; it goes on in one row or in the next."""
    rows, history = list[Row](), [0]
    for news, response in calls:
        history = history + [1] * news
        rows.append(Row(history, [2] * response, [-1.0] * response, 0.0))
        history = history + [2] * response
    batch = batch_of(rows)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))))
    chains: list[np.ndarray | None] = [chain for chain in np.split(np.arange(len(rows)), cuts) if len(chain)]
    chains = data.draw(st.permutations([*chains, None, None]))
    values_R = torch.arange(1.0, len(batch.mask_R) + 1)
    spread_rows = spread(batch, values_R, chains)
    assert gather(batch, spread_rows, chains).tolist() == values_R.tolist()
    pads = [row for chain, row in zip(chains, spread_rows, strict=True) if chain is None]
    assert [row.tolist() for row in pads] == [[0.0], [0.0]], "a pad row weighs nothing"
    for chain, row in zip(chains, spread_rows, strict=True):
        if chain is not None:
            fields = row_of(batch, chain)
            assert (row > 0).tolist() == (fields["responses"] == 2).tolist(), "values are at the responses"
            assert {len(fields[name]) for name in ("response_mask", "rollout_log_probs")} == {len(row)}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_every_worker_has_every_step_and_every_row_is_dealt_out_once(sizes: list[int], workers: int) -> None:
    ends = np.cumsum([0, *sizes])
    steps = [np.arange(start, end) for start, end in itertools.pairwise(ends)]

    def divide(rows: list[int], count: int) -> list[list[int]]:
        return [rows[worker::count] for worker in range(count)]

    order = lay_out(steps, workers, divide)
    assert sorted(order) == list(range(len(order)))
    assert len(order) % (workers * len(steps)) == 0
    per_step = len(order) // len(steps) // workers
    assert per_step == -(-max(sizes) // workers), "no more pads than it takes"
    shares_of_workers = np.array(order).reshape(workers, len(steps), per_step)
    for number, step in enumerate(steps):
        dealt = set(shares_of_workers[:, number].ravel().tolist())
        assert set(step.tolist()) <= dealt
        assert all(row >= ends[-1] for row in dealt - set(step.tolist())), "what is added are pads"
