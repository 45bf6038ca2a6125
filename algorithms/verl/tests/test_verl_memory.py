"""What a run takes of a GPU's memory, against sums made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions, PpoOptions
from agl_algorithms.ppo import Ppo
from agl_core.protocols import PolicySpec
from agl_verl.config.memory import GB, Estimate, Shape, described, estimate
from agl_verl.options import VerlOptions

CALC = Path(__file__).resolve().parents[3] / "examples" / "calc" / "policy"
LLAMA_3B = Shape(parameters=3_213_000_000, layers=28, hidden=3072, vocabulary=128_256, cached=2 * 28 * 8 * 128)
"""Llama-3.2-3B, the paper's model."""
ONE = {"serving_memory": 0.5, "max_context": 8192, "tokens_per_micro_batch": 8192}


def of(shape: Shape = LLAMA_3B, algorithm: Any = None, lora: dict[str, Any] | None = None, **options: Any) -> Estimate:
    chosen = algorithm or Grpo(GrpoOptions(beta=0))
    return estimate(VerlOptions(**{**ONE, **options}), PolicySpec("m", "bfloat16", lora=lora), chosen, shape)


def test_the_sums_are_those_made_by_hand() -> None:
    found = of()
    assert found.serving == {"weights and moments": pytest.approx(38.556 * GB), "servers": 40 * GB}
    assert found.training["weights and moments"] + found.training["gradients"] == pytest.approx(51.408 * GB)
    assert found.training["logits"] == 2 * 8192 * 128_256 * 4
    assert found.tokens_cached == int((40 * GB - 6.426 * GB) / (57_344 * 2))
    over_eight = of(gpus_per_node=8)
    assert over_eight.training["gradients"] == pytest.approx(found.training["gradients"] / 8)
    assert of(algorithm=Ppo(PpoOptions())).training["gradients"] == pytest.approx(2 * found.training["gradients"])


def test_a_model_of_3b_on_one_gpu_needs_its_weights_offloaded_while_agents_run() -> None:
    """38.6 GB of weights and moments, and half of 80 GB for serving."""
    told = of().verdict(80, 8192)
    assert told is not None
    assert "does not fit into 80 GB" in told
    assert "offload = true" in told
    assert of(offload=True).verdict(80, 8192) is None
    assert of(gpus_per_node=8).verdict(80, 8192) is None
    assert "tokens_per_micro_batch" in (of(offload=True).verdict(60, 8192) or "")


@pytest.mark.parametrize("column", [1, 2, 3])
def test_the_table_for_the_papers_model_is_this_arithmetic(column: int) -> None:
    page = (CALC.parents[2] / "deploy" / "README.md").read_text()
    table = page[page.index("The paper's model") :].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    row = {cells[0].partition(",")[0].partition(":")[0].strip("`"): cells[column] for cells in rows}
    gpus = int(rows[0][column].split()[0])
    options: dict[str, Any] = {
        "gpus_per_node": min(gpus, 8),
        "nodes": max(1, gpus // 8),
        "offload": row["offload"] == "`true`",
        "serving_memory": float(row["serving_memory"]),
        "tokens_per_micro_batch": int(row["tokens_per_micro_batch"]),
        "max_context": int(row["max_context"]),
    }
    found = of(**options)
    assert found.verdict(80, options["max_context"]) is None
    for name, value in (
        ("weights and moments", found.training["weights and moments"]),
        ("while agents run", sum(found.serving.values())),
        ("during an update", sum(found.training.values())),
    ):
        assert row[name] == f"{value / GB:.1f} GB"
    assert int(row["tokens whose keys and values fit"].replace(",", "")) == found.tokens_cached


def test_a_pass_that_only_scores_can_take_more_than_one_with_gradients() -> None:
    found = of(offload=True, tokens_per_scoring_pass=65_536)
    assert found.training["logits"] == 2 * 65_536 * 128_256 * 4
    assert "tokens_per_scoring_pass" in (found.verdict(80, 8192) or "")
    assert of(offload=True, tokens_per_scoring_pass=16_384).training == of(offload=True).training


def test_separate_gpus_and_adapters_take_less() -> None:
    beside = of(serving_gpus=1)
    assert sum(beside.serving.values()) == 0
    adapted = of(lora={"rank": 16})
    assert sum(adapted.training.values()) < 0.5 * sum(of().training.values())
    assert adapted.training["weights and moments"] > 4 * LLAMA_3B.parameters


def test_a_cache_that_is_too_small_for_one_reply_is_named() -> None:
    assert "serving_memory or tensor_parallel" in (of(serving_memory=0.09, offload=True).verdict(80, 8192) or "")


def test_a_models_shape_is_read_from_its_files(tmp_path: Path) -> None:
    config = json.loads((CALC / "config.json").read_text())
    shape = Shape.of(CALC)
    assert shape is not None
    assert 500_000 < shape.parameters < 1_500_000
    assert (shape.layers, shape.vocabulary) == (config["num_hidden_layers"], config["vocab_size"])
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert Shape.of(tmp_path) is None, "without a configuration"
    (tmp_path / "config.json").write_text((CALC / "config.json").read_text())
    told = Shape.of(tmp_path)
    assert told is not None
    assert told.parameters == 17


def test_it_is_said_in_lines_with_a_verdict() -> None:
    algorithm = Grpo(GrpoOptions(beta=0))
    lines = list(described(VerlOptions(max_context=1024), PolicySpec(str(CALC)), algorithm))
    assert [line.partition(":")[0] for line in lines[:2]] == [
        "Memory of a GPU while agents run",
        "Memory of a GPU during an update",
    ]
    assert lines[-1] == "By this arithmetic it fits into 80 GB."
    (unknown,) = described(VerlOptions(), PolicySpec("some/model-on-a-hub"), algorithm)
    assert "not on this machine" in unknown
