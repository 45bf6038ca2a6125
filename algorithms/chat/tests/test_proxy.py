"""`agl proxy` before servers that speak as vLLM and SGLang document; `live_chat.py` of agl-verl has the real vLLM."""

from __future__ import annotations

import asyncio
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from agl_chat.proxy import make_proxy
from agl_core.cli import app
from agl_core.errors import ConfigError, EngineError
from agl_server.http import listening as listening_sockets
from agl_server.testing import until

from .conftest import USER, ScriptedChat, ServedModel, assert_continues, client_of, echo, listening
from .test_backends import BACKENDS, SGLANG, VLLM, Server

OWNERS = {VLLM: "vllm", SGLANG: "sglang"}


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


async def test_a_conversation_goes_on_from_its_ids(
    folder: Path, qwen: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are another tokenisation than the tokenizer's own: one letter a token."""
    server = WholeServer(VLLM, ScriptedChat(qwen).letters("answer"))
    started, printed = list[Any](), io.StringIO()
    monkeypatch.setattr(listening_sockets, "run", started.append)
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.setattr("sys.stdout", printed)
    async with listening(server.app) as url:
        app(["proxy", url, str(folder), "--port", "0"], standalone_mode=False)
        serving = asyncio.create_task(started.pop())
        await until(lambda: "serving" in printed.getvalue())
        address = printed.getvalue().split()[-1]
        headers = {"authorization": "Bearer s3cret", "x-agl-rollout": "r/0"}
        messages, replies = [USER], list[Any]()
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=60) as client:
            for _ in range(3):
                body = {"model": "qwen", "messages": messages, "return_token_ids": True}
                replies.append((await client.post(f"{address}/chat/completions", json=body)).json())
                messages = [*messages, echo(replies[-1]), USER]
        serving.cancel()
        await asyncio.wait({serving})
    for reply, following in pairwise(replies):
        assert_continues(reply, following)
