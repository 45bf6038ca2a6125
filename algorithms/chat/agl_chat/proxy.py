"""`agl proxy`: the chat layer before a vLLM or SGLang server that runs already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer
import uvicorn
from starlette.applications import Starlette

from agl_chat.api import ModelServer, create_app
from agl_chat.backends import Request, SglangBackend, VllmBackend
from agl_chat.conversation import load_text
from agl_core.apis.errors import ApiError
from agl_core.cli.screen import Screen
from agl_core.errors import ConfigError, EngineError
from agl_server.commands.screen import KeyVariable, Port
from agl_server.commands.upstreams import choose_key, choose_url
from agl_server.http import listening

Url = Annotated[str, typer.Argument(metavar="URL", help="The model server, as http://127.0.0.1:8000.")]
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER", exists=True, file_okay=False, help="The model's folder; it needs no weights in it."
    ),
]

BACKENDS: dict[str, type[VllmBackend | SglangBackend]] = {"vllm": VllmBackend, "sglang": SglangBackend}
"""By what a server's list of models says they are owned by."""
_FLAGS = "Start vLLM with --enable-scale-out --logprobs-mode processed_logprobs."


def proxy(url: Url, model: Folder, upstream_key_env: KeyVariable = None, port: Port = 8300) -> None:
    """Stand before a vLLM or SGLang server, so that a conversation goes on from the token ids that were sampled.

    Name the address that it prints as --upstream of `agl run`, or as online.upstream: they record these ids. Clients
    send the model server's key, and tool calls and reasoning are parsed here.

    vLLM has to run with `--enable-scale-out --logprobs-mode processed_logprobs`; SGLang needs nothing.

    Only this machine reaches the address. Ctrl-C or SIGTERM stops it.
    """
    listening.run(_serve(choose_url(url).removesuffix("/v1"), model, choose_key(upstream_key_env), port))


async def _serve(url: str, folder: Path, key: str, port: int) -> None:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None, trust_env=False) as client:
        app = await make_proxy(client, folder, key)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        with listening.bind("127.0.0.1", port) as listener:
            Screen().print(f"serving at {listening.url_of(*listener.getsockname())}/v1")
            await server.serve(sockets=[listener])


async def make_proxy(client: httpx.AsyncClient, folder: Path, key: str) -> Starlette:
    """The chat layer before a client's server. ConfigError if that is neither vLLM nor SGLang, EngineError if it gives
    no tokens with their log-probabilities at the sampling temperature."""
    server = f"The model server at {client.base_url}"
    try:
        models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        kind, length = models[0]["owned_by"], int(models[0]["max_model_len"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{server} does not describe its models ({type(error).__name__}: {error}).") from error
    if kind not in BACKENDS:
        raise ConfigError(
            f"{server} is neither vLLM nor SGLang, whose routes for tokens the chat layer needs: its models are owned "
            f"by {kind!r}. Name it as --upstream itself; it tokenises each turn anew."
        )
    text = load_text(str(folder))
    backend = BACKENDS[kind](client, text.eos_ids)
    request = Request("agl-1", np.array(text.encode("What is"), np.int32), 1, model=models[0]["id"], top=1)
    try:
        replies = [await backend.generate(asked) for asked in (request, replace(request, id="agl-2", temperature=2.0))]
    except ApiError as error:
        raise EngineError(f"{error} {_FLAGS}") from error
    plain, flat = ([token.likeliest for token in reply.responses[0].tokens] for reply in replies)
    if plain == flat:
        raise EngineError(f"{server} gives log-probabilities that are not those at the sampling temperature. {_FLAGS}")
    return create_app({card["id"]: ModelServer(card["id"], text, length) for card in models}, backend, api_key=key)
