"""skyrl-tx, a server with the Tinker API, on this machine's CPU, with a tiny random Qwen3, or with another policy:

    python -m algorithms.tinker.tests.skyrl_tx POLICY COMMAND…

starts it, runs the command with `{url}` and `{base}` filled in (the server's address, and its name of the policy), with
its key in the environment, and stops it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
KEY = "tml-anything"
SECONDS_TO_START = 120.0
RANK = 8
"""The largest of an adapter."""
ADAPTERS = 18
"""One is the base's. Their number is part of each compiled shape."""


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


class SkyrlTx:
    """The server, on a port, a database and a checkpoints folder that it keeps when it is killed and started again."""

    def __init__(
        self, folder: Path, policy: Path | None = None, *, name: str = "", adapters: int = ADAPTERS, rows: int = 1
    ) -> None:
        """`name` is its own of the model. Up to `rows` rows of an update are computed together, and four times as many
        replies."""
        self.policy = policy or folder / "policy"
        """The model's folder, as agl reads it."""
        self.base = name or str(folder / "base")
        """The same, as the server knows it."""
        self.checkpoints = folder / "checkpoints"
        self._log, programs = folder / "server.log", folder / "bin"
        if policy is None:
            make_policy(self.policy)
        for_old_transformers(self.policy, folder / self.base)
        programs.mkdir()
        # It starts its engine by `uv run … -m MODULE …`: in this environment all is installed.
        (programs / "uv").write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {PYTHON} "$@"\n')
        (programs / "uv").chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # Rows of one shape, however many a request has: each shape takes seconds to compile.
        backend = {"max_lora_adapters": adapters, "max_lora_rank": RANK}
        backend |= {"train_micro_batch_size": rows, "sample_max_num_sequences": 4 * rows}
        self._command = [
            *(str(PYTHON), "-m", "tx.tinker.api", "--base-model", self.base, "--host", "127.0.0.1"),
            *("--port", str(port), "--database-url", f"sqlite:///{folder}/tx.db"),
            *("--checkpoints-base", str(self.checkpoints), "--backend-config", json.dumps(backend)),
        ]
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(PYTHON.parents[1] / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                self._command,
                cwd=self._log.parent,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + SECONDS_TO_START
        while not _answers(self.url):
            assert self._server.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.5)

    def pause(self) -> None:
        """Leave all requests without an answer from now on."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it and its engine, if it runs."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None


@contextmanager
def skyrl_tx(folder: Path) -> Iterator[SkyrlTx]:
    """It runs while the block does."""
    server = SkyrlTx(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def main() -> int:
    policy, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        server = SkyrlTx(Path(folder), Path(policy).resolve(), adapters=4, rows=8)
        try:
            server.start()
            filled = [part.replace("{url}", server.url).replace("{base}", server.base) for part in command]
            return subprocess.run(filled, env={**os.environ, "TINKER_API_KEY": KEY}).returncode
        except KeyboardInterrupt:
            return 130
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
