"""vLLM answers with what `agl policy export` wrote: the same prompts and the same log-probabilities as in training."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Call, Mode

CALC = Path(__file__).parents[3] / "examples" / "calc" / "train.toml"
SMALL = (
    *("name=calc", "train.steps=1", "train.groups_per_step=2", "train.group_size=8", "eval.every=1", "eval.tasks=3"),
    "policies.default.optimizer.learning_rate=1e-3",
)
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def agl(folder: Path, *arguments: str | Path) -> None:
    command = [str(Path(sys.executable).with_name("agl")), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a trained run, and its policy as a folder."""
    folder = tmp_path_factory.mktemp("exported")
    agl(folder, "train", CALC, *(f"--set={each}" for each in SMALL))
    agl(folder, "policy", "export", "calc@1", "--out", "policy")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "policy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    command += ["--enforce-eager", "--max-num-seqs", "8", "--served-model-name", "calc"]
    log = folder / "vllm.log"
    environment = {**os.environ, **VARIABLES}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def recorded(run: Path) -> list[Call]:
    """The calls of the evaluation that the exported weights answered."""

    async def read() -> list[Call]:
        async with SqliteStore(run / "store.sqlite", read_only=True) as store:
            rollouts = await store.rollouts(step=1, mode=Mode.EVAL_SAMPLED)
            return await store.calls([AttemptKey(each.id, 0) for each in rollouts])

    return asyncio.run(read())


@pytest.mark.timeout(1500)
def test_vllm_answers_with_an_exported_policy(folder: Path, server: str) -> None:
    calls = recorded(folder / "runs" / "calc")
    assert len(calls) >= 3
    with httpx.Client(timeout=300, trust_env=False) as client:
        for call in calls:
            [choice] = call.choices
            assert call.prompt_ids is not None
            assert choice.response_ids is not None
            assert choice.logprobs is not None
            ids = [*call.prompt_ids.tolist(), *choice.response_ids.tolist()]
            asked = {"model": "calc", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
            scored = client.post(f"{server}/completions", json=asked).json()["choices"][0]["prompt_logprobs"]
            found = [scored[at][str(ids[at])]["logprob"] for at in range(len(call.prompt_ids), len(ids))]
            np.testing.assert_allclose(found, choice.logprobs, atol=1e-3)
        first = next(call for call in calls if call.sequence == 0)
        chat = {"model": "calc", "messages": first.request["messages"], "tools": first.request["tools"]}
        chat |= {"temperature": 0, "max_tokens": 32, "return_token_ids": True, "tool_choice": "none"}
        reply = client.post(f"{server}/chat/completions", json=chat).json()
    assert reply["choices"][0]["message"]["content"], reply
    assert first.prompt_ids is not None
    assert reply["prompt_token_ids"] == first.prompt_ids.tolist()
