"""The page docs/tinker.md, as a stranger with a key follows it, with skyrl-tx as the service: `make test-tinker`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import PeftConfig
from safetensors.torch import load_file

from tests.tutorial.test_tutorial import Terminals

from .skyrl_tx import KEY, ROOT, SkyrlTx

NAME = "Qwen/Qwen3-8B"
"""The page's model. Here it is calc's policy, in a folder of that name."""
ADAPTERS = 8
"""The base's, two for each start of the engine, by `agl doctor` and by `agl train`, and some to spare."""


@pytest.mark.timeout(1800)
def test_a_stranger_goes_from_a_key_to_a_trained_adapter(tmp_path: Path) -> None:
    reader, service = tmp_path / "reader", tmp_path / "service"
    shutil.copytree(ROOT / "examples" / "calc" / "policy-qwen3", reader / NAME)
    service.mkdir()
    server = SkyrlTx(service, reader / NAME, name=NAME, adapters=ADAPTERS, rows=8)
    terminals = Terminals(reader)
    terminals.environment |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": server.url}
    try:
        server.start()
        terminals.play((ROOT / "docs" / "tinker.md").read_text())
    finally:
        server.kill()
    summary = json.loads((reader / "runs" / "calc" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["cost"] > 0
    for adapter in (reader / "runs" / "calc" / "model", reader / "my-adapter"):
        assert PeftConfig.from_pretrained(adapter).base_model_name_or_path.endswith(NAME)
        weights = load_file(adapter / "adapter_model.safetensors")
        assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name), "it was trained"
