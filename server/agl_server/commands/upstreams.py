"""OpenAI-compatible model servers for `agl run` and `agl doctor`: their models, and whether replies carry ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from agl_core.errors import ConfigError, EngineError, nearest
from agl_core.protocols import Upstream

_HOSTED = "https://api.openai.com/v1"
ANEW = "note: the model server tokenises each turn anew. `agl proxy` before a vLLM or SGLang server keeps the ids."
_TIMEOUT = httpx.Timeout(120, connect=10)
_SAY_OK = {"messages": [{"role": "user", "content": "Say OK."}]}
_WITH_IDS = {"return_token_ids": True, "logprobs": True, "max_tokens": 8}


def choose_url(url: str | None) -> str:
    """The base URL to forward to: as named, else that of OpenAI clients by the environment."""
    address = url or os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    if not address and os.environ.get("OPENAI_API_KEY"):
        address = _HOSTED
    if not address:
        raise ConfigError(
            "There is no model server to forward to. Name one with --upstream http://HOST:PORT/v1, or set "
            "OPENAI_BASE_URL (for OpenAI's own, OPENAI_API_KEY is enough)."
        )
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"The upstream '{address}' is not a URL. Name it like http://127.0.0.1:8000/v1.")
    return address.rstrip("/")


def choose_key(variable: str | None) -> str:
    """The upstream's API key, from the environment variable that holds it (by default OPENAI_API_KEY)."""
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"The environment variable {variable}, named by --upstream-key-env, is not set.")
    return os.environ.get(variable or "OPENAI_API_KEY") or "none"


def open_upstream(url: str, key: str, model: str | None) -> tuple[Upstream, str]:
    """The model server, and why its replies lack exact ids (empty if they do not); EngineError if none answers."""
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT, trust_env=False) as client:
        response = _send(client, "GET", f"{url}/models")
        listed = _names(response)
        if not model and not listed:
            raise EngineError(
                f"The model server at {url} does not list its models (GET /models answered {response.status_code}). "
                f"Does the URL end in /v1? If it does, name the model with --model."
            )
        names = [model] if model else listed
        if len(names) > 1:
            models, missing = {name: name for name in names}, "the server has several models: name one with --model"
        else:
            models, missing = {"default": names[0]}, missing_ids(_complete(client, url, names[0], listed))
        streams = len(names) == 1 and _streams(client, url, names[0], with_ids=not missing)
    continues = bool(listed) and all(model.get("owned_by") == "agl" for model in response.json()["data"])
    upstream = Upstream((url,), models, key, returns_ids=not missing, streams=streams, continues_ids=continues)
    return upstream, missing


def missing_ids(completion: Mapping[str, Any]) -> str:
    """The ids and log-probabilities that a completion lacks, in words."""
    choice = completion["choices"][0]
    fields = {
        "prompt_token_ids": completion.get("prompt_token_ids"),
        "token_ids": choice.get("token_ids"),
        "logprobs": (choice.get("logprobs") or {}).get("content"),
    }
    missing = ", ".join(name for name, values in fields.items() if not values)
    return f"its replies lack {missing}" if missing else ""


def _names(response: httpx.Response) -> list[str]:
    try:
        return [str(model["id"]) for model in response.json()["data"]] if response.is_success else []
    except (ValueError, KeyError, TypeError):
        return []


def _complete(client: httpx.Client, url: str, model: str, listed: Sequence[str]) -> Mapping[str, Any]:
    """A short chat completion, with ids if the server knows the fields that ask for them."""
    request = {"model": model, **_SAY_OK}
    response = _send(client, "POST", f"{url}/chat/completions", request | _WITH_IDS)
    if 400 <= response.status_code < 500:  # Hosted APIs refuse fields that they do not know.
        response = _send(client, "POST", f"{url}/chat/completions", request)
    if not response.is_success:
        raise EngineError(
            f"The model server at {url} answered a chat completion of the model '{model}' with {response.status_code}: "
            f"{response.text[:300]}. Is that a model of this server (--model)? {nearest(model, listed)}"
        )
    completion: dict[str, Any] = response.json()
    return completion


def _streams(client: httpx.Client, url: str, model: str, *, with_ids: bool) -> bool:
    """True if the server streams a short chat completion, with ids if asked for."""
    request = {"model": model, **_SAY_OK, "stream": True, "stream_options": {"include_usage": True}}
    response = _send(client, "POST", f"{url}/chat/completions", request | (_WITH_IDS if with_ids else {}))
    streams = response.is_success and response.headers.get("content-type", "").startswith("text/event-stream")
    return streams and (not with_ids or all(f'"{name}"' in response.text for name in ("prompt_token_ids", "token_ids")))


def _send(client: httpx.Client, method: str, url: str, body: Any = None) -> httpx.Response:
    try:
        response = client.request(method, url, json=body)
    except httpx.HTTPError as error:
        raise EngineError(
            f"The model server at {url} cannot be reached ({type(error).__name__}: {error}). "
            f"Is it running, and is the address right?"
        ) from error
    if response.status_code in (401, 403):
        raise EngineError(
            f"The model server at {url} refuses the API key ({response.status_code}). Put the right one into an "
            f"environment variable and name it with --upstream-key-env (by default OPENAI_API_KEY)."
        )
    return response
