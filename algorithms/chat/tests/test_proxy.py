"""`agl proxy` before servers that speak as vLLM and SGLang document; `live_chat.py` of agl-verl has the real vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_chat.proxy import make_proxy
from agl_core.errors import ConfigError, EngineError
from agl_server.store.sqlite import SqliteStore

from .conftest import ServedModel, client_of, listening
from .test_backends import BACKENDS, SGLANG, VLLM, Server

OWNERS = {VLLM: "vllm", SGLANG: "sglang"}
AGENT = """
import openai
messages = [{"role": "user", "content": "What is 12 plus 3?"}]
for _ in range(3):
    reply = openai.OpenAI().chat.completions.create(model="gpt", messages=messages).choices[0].message
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "And then?"}]
"""


class WholeServer(Server):
    """Lists its model too; log-probabilities of the likeliest depend on the temperature, unless they are `raw`."""

    def __init__(self, path: str, ids: list[int], *, owner: str | None = None, raw: bool = False) -> None:
        super().__init__(path, ids)
        card = {"id": "qwen", "object": "model", "owned_by": owner or OWNERS[path], "max_model_len": 4096}
        self.raw = raw
        self.app.routes.append(Route("/v1/models", lambda request: JSONResponse({"data": [card]})))

    def vllm(self, body: dict[str, Any]) -> Any:
        return self._at_temperature(body, super().vllm(body))

    def sglang(self, body: dict[str, Any]) -> Any:
        return self._at_temperature(body, super().sglang(body))

    def _at_temperature(self, body: dict[str, Any], answer: Any) -> Any:
        if body["sampling_params"]["temperature"] == 2.0 and not self.raw:
            text = json.dumps(answer)
            for token in range(2, 9):
                text = text.replace(f"-{token}.0", f"-{token / 2}")
            answer = json.loads(text)
        return answer


@pytest.fixture
def folder(qwen: ServedModel, tmp_path: Path) -> Path:
    """The model's folder without its weights."""
    folder = tmp_path / "qwen"
    qwen.tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "eos_token_id": qwen.tokenizer.eos_token_id})
    )
    return folder


async def front(server: Starlette, folder: Path) -> httpx.AsyncClient:
    return client_of(await make_proxy(client_of(server), folder, "key"))


@pytest.mark.parametrize("path", BACKENDS)
async def test_it_lists_and_answers_for_the_models_of_the_server(path: str, folder: Path) -> None:
    server = WholeServer(path, [9, 4, 1])
    client = await front(server.app, folder)
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["owned_by"]) == ("qwen", "agl")
    body = {"model": "qwen", "messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True}
    reply = (await client.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["token_ids"] == [9, 4, 1]


@pytest.mark.parametrize(
    ("server", "error", "words"),
    [
        (WholeServer(VLLM, [9], owner="llamacpp").app, ConfigError, r"neither vLLM nor SGLang.*'llamacpp'.*anew"),
        (
            WholeServer(VLLM, [9], raw=True).app,
            EngineError,
            r"not those at the sampling temperature.*processed_logprobs",
        ),
        (WholeServer(SGLANG, [9], owner="vllm").app, EngineError, r"refuses this.*--enable-scale-out"),
        (Server(VLLM, [9]).app, EngineError, "does not describe its models.*404"),
    ],
)
async def test_a_server_that_will_not_do_is_refused_at_the_start(
    server: Starlette, error: type[Exception], words: str, folder: Path
) -> None:
    with pytest.raises(error, match=words):
        await front(server, folder)


async def test_agl_run_records_a_conversation_that_goes_on_from_its_ids(
    folder: Path, qwen: ServedModel, tmp_path: Path
) -> None:
    """The ids are another tokenisation than the tokenizer's own: one letter a token."""
    letters = [qwen.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "answer"]
    server = WholeServer(VLLM, [*letters, qwen.tokenizer.eos_token_id])
    environment = {**os.environ, "OPENAI_API_KEY": "s3cret"}

    async def agl(*arguments: str) -> asyncio.subprocess.Process:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "agl_core", *arguments]
        return await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=tmp_path, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL
        )

    async with listening(server.app) as url:
        before = await agl("proxy", url, str(folder), "--port", "0")
        assert before.stdout is not None
        try:
            address = (await before.stdout.readline()).decode().split()[-1]
            run = await agl("run", "--upstream", address, "--", sys.executable, "-c", AGENT)
            _, said = await run.communicate()
        finally:
            before.terminate()
            await before.wait()
    assert run.returncode == 0, said.decode()
    assert "note:" not in said.decode()
    async with SqliteStore(tmp_path / "runs" / "capture" / "store.sqlite", read_only=True) as store:
        (rollout,) = await store.rollouts()
        calls = await store.calls(attempt.key for attempt in await store.attempts(rollout.id))
    prompts = [call.prompt_ids.tolist() for call in calls]
    assert len(prompts) == 3
    for prompt, following in itertools.pairwise(prompts):
        recorded = [*prompt, *server.ids]
        assert following[: len(recorded)] == recorded
