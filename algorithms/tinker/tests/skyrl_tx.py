"""skyrl-tx, a server with the Tinker API, on this machine's CPU, with a tiny random Qwen3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
KEY = "tml-anything"
SECONDS_TO_START = 120.0


@dataclass(frozen=True)
class SkyrlTx:
    url: str
    policy: Path
    """The model's folder, as agl reads it."""
    base: str
    """The same, as the server knows it."""


def make_policy(folder: Path) -> None:
    """A Qwen3 with random weights, and the tokenizer and template of the calc example."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "calc" / "policy")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def for_old_transformers(policy: Path, base: Path) -> None:
    """A copy with the files as transformers 4.57 writes them, which skyrl-tx needs."""
    shutil.copytree(policy, base)
    for name, changes in {
        "config.json": {"rope_theta": 10_000.0},
        "tokenizer_config.json": {"extra_special_tokens": {}, "tokenizer_class": "PreTrainedTokenizerFast"},
    }.items():
        written = json.loads((base / name).read_text()) | changes
        (base / name).write_text(json.dumps(written))


@contextmanager
def skyrl_tx(folder: Path, *, adapters: int = 4) -> Iterator[SkyrlTx]:
    """It runs while the block does."""
    policy, base, programs = folder / "policy", folder / "base", folder / "bin"
    make_policy(policy)
    for_old_transformers(policy, base)
    programs.mkdir()
    # It starts its engine by `uv run … -m MODULE …`: in this environment all is installed.
    (programs / "uv").write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {PYTHON} "$@"\n')
    (programs / "uv").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "tx.tinker.api", "--base-model", base, "--host", "127.0.0.1", "--port", str(port)),
        *("--database-url", f"sqlite:///{folder}/tx.db", "--checkpoints-base", folder / "checkpoints"),
        *("--backend-config", json.dumps({"max_lora_adapters": adapters, "max_lora_rank": 8})),
    ]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + SECONDS_TO_START
        while not _answers(url):
            assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)
        yield SkyrlTx(url, policy, str(base))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", trust_env=False).is_success
    except httpx.HTTPError:
        return False
