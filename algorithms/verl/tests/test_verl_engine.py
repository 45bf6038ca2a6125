"""The run's side of the engine, its checkpoints, and what it knows of errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from agl_core.errors import CheckpointError, EngineError
from agl_core.protocols import EngineContext, PolicySpec
from agl_verl import environment
from agl_verl.checkpoint import finish, read, shards
from agl_verl.environment import check_flash_attention
from agl_verl.options import VerlOptions
from agl_verl.plugin import VerlEngine

SPEC = PolicySpec(model="/m", algorithm="grpo", algorithm_options={"beta": 0})


def context(run_dir: Path, *policies: str) -> EngineContext:
    return EngineContext(
        run_dir=run_dir,
        seed=1,
        policies=dict.fromkeys(policies or ("default",), SPEC),
        deterministic=False,
        plugin_files=(),
        api_key="secret",
    )


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
    engine = VerlEngine(VerlOptions(), context(tmp_path))
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
