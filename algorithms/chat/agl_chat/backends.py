"""Back ends, which sample for the chat layer: what one is asked and answers, and those over HTTP, vLLM and SGLang.

The client of these two has the server's base URL and key, or is that of an app in this process (`client_of`). Both
servers give log-probabilities at the sampling temperature if they are started so: vLLM with `--enable-scale-out
--logprobs-mode processed_logprobs`, as veRL's servers are, and SGLang by default.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import numpy as np
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agl_chat.requests import ChatError, unsupported
from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError
from agl_core.types import FinishReason, Logprobs, TokenMask, Tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a response."""

    choice: int
    id: int
    logprob: float
    likeliest: Mapping[int, float]
    """The likeliest ids at its position and their log-probabilities, best first; empty if not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to answer, `n` times."""

    id: str
    prompt_ids: Tokens
    """[P] int32, not empty and shorter than the context."""
    max_tokens: int
    """Limit of each response, forced tokens included; the context has room for as many."""
    n: int = 1
    temperature: float = 1.0
    """0 takes the likeliest token; its log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    seed: int = 0
    """The draw depends on the seed, the choice's index and the position only."""
    forced_ids: tuple[int, ...] = ()
    """Tokens that every response starts with, whatever the policy prefers; they are masked."""
    top: int = 0
    """How many of the likeliest tokens are reported at each position."""
    stop: Callable[[Sequence[int]], bool] | None = None
    """Asked after each sampled token, with the response so far: whether it is complete."""
    stops: tuple[str, ...] = ()
    """The strings that `stop` looks for, for an engine that detokenises itself."""
    grammar: str | None = None
    """The form that every response must have (`agl_core.learning.transitions.grammar_of`)."""
    distortions: Mapping[str, Any] = field(default_factory=dict)
    """Fields that change the distribution tokens are drawn from, as vLLM has them: `top_k`, penalties and the like."""
    watch: Callable[[SampledToken], None] | None = None
    """Told of each token as it comes, on the engine's thread, by an engine that can."""
    model: str = "default"
    """The name of the model that answers."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response, all of it from one version of the weights."""

    ids: Tokens
    """[T] int32, exactly as sampled, the end token included."""
    logprobs: Logprobs
    """[T] float32, log-softmax(logits / temperature) at each id, over all tokens that the grammar allows."""
    mask: TokenMask | None
    """[T] bool, False where a token was forced, or the only one that the grammar allows; None: all sampled."""
    finish_reason: FinishReason
    """STOP, LENGTH, or ABORTED by an engine of its own accord."""
    likeliest: tuple[dict[int, float], ...] = ()
    """Of each token's position, the likeliest ids and their log-probabilities, best first; empty if not asked for."""

    def tokens(self, choice: int) -> list[SampledToken]:
        """Its tokens, as those of this choice."""
        likeliest = self.likeliest or [dict[int, float]()] * len(self.ids)
        columns = zip(self.ids.tolist(), self.logprobs.tolist(), likeliest, strict=True)
        return [SampledToken(choice, token, logprob, others) for token, logprob, others in columns]


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """The responses to one request."""

    request: Request
    responses: tuple[Response, ...]
    version: int
    prefilled: int
    """Prompt tokens computed, summed over the responses."""
    reused: int
    """Prompt tokens taken from the cache, summed over the responses."""


class Backend(Protocol):
    """An engine: tokens in, tokens out."""

    async def generate(self, request: Request) -> Generated:
        """Answer a request; cancelling it frees its place. EngineError if the engine cannot answer."""


VLLM_MAX_LOGPROBS = 20
"""Of each position, by vLLM's default."""


class VllmBackend:
    """vLLM's route for tokens, `POST /inference/v1/generate`.

    A reply is of the version that the header `x-agl-policy` names, else of version 0. A response also ends at one of
    `end_ids`, whatever the server takes for the model's end tokens.
    """

    def __init__(self, client: httpx.AsyncClient, end_ids: Collection[int] = ()) -> None:
        self._client, self._end_ids = client, sorted(end_ids)

    async def generate(self, request: Request) -> Generated:
        """See `Backend`. Cancelling it closes the connection, by which vLLM ends the sampling.

        vLLM detokenises only to find stop strings; markers of tool calls can be special tokens, which it would skip.
        """
        sampling = {
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "max_tokens": _sampled(request),
            "stop": list(request.stops),
            "stop_token_ids": self._end_ids,
            "skip_special_tokens": False,
            "detokenize": bool(request.stops),
            # The sampled token counts as one of them, even where it is not among the likeliest.
            "logprobs": min(request.top + 1, VLLM_MAX_LOGPROBS) if request.top else 0,
            **({"structured_outputs": form} if (form := _form(request)) else {}),
            **request.distortions,
        }
        body = {
            "request_id": request.id,
            "model": request.model,
            "token_ids": _prompt(request),
            "sampling_params": sampling,
        }
        reply = await _post(self._client, "/inference/v1/generate", body)
        answer = orjson.loads(reply.content)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        responses = [
            _response(
                request,
                choice["token_ids"],
                [entry["logprob"] for entry in choice["logprobs"]["content"]],
                [_vllm_likeliest(entry, request.top) for entry in choice["logprobs"]["content"]],
                choice["finish_reason"],
            )
            for choice in choices
        ]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        version = int(reply.headers.get(HEADER_POLICY, 0))
        return _generated(request, responses, version, details.get("cached_tokens") or 0)


class SglangBackend:
    """SGLang's own route, `POST /generate`.

    A reply is of the version that `weight_version` names, if it is a number, else of version 0. SGLang goes by the seed
    only where it was started with `--enable-deterministic-inference`.
    """

    def __init__(self, client: httpx.AsyncClient, end_ids: Collection[int] = ()) -> None:
        self._client, self._end_ids = client, sorted(end_ids)

    async def generate(self, request: Request) -> Generated:
        """See `Backend`. Cancelling it closes the connection, by which SGLang ends the sampling."""
        if "allowed_token_ids" in request.distortions:
            raise unsupported("allowed_token_ids", "SGLang has no such field", "allowed_token_ids")
        sampling = {
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            # What the model's generation_config.json sets holds unless it is named.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": request.seed,
            "max_new_tokens": _sampled(request),
            "stop": list(request.stops),
            "stop_token_ids": self._end_ids,
            "skip_special_tokens": False,
            **_sglang_form(_form(request) or {}),
            **request.distortions,
        }
        body = {
            "rid": request.id,
            "input_ids": _prompt(request),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": request.top,
        }
        answer = orjson.loads((await _post(self._client, "/generate", body)).content)
        infos = [choice["meta_info"] for choice in (answer if isinstance(answer, list) else [answer])]
        responses = [
            _response(
                request,
                [token for _, token, *_ in info["output_token_logprobs"]],
                [logprob for logprob, *_ in info["output_token_logprobs"]],
                [
                    {token: logprob for logprob, token, *_ in position or ()}
                    for position in info.get("output_top_logprobs") or ()
                ],
                (info["finish_reason"] or {}).get("type"),
            )
            for info in infos
        ]
        version = str(infos[0].get("weight_version", ""))
        cached = sum(info.get("cached_tokens") or 0 for info in infos)
        return _generated(request, responses, int(version) if version.isdecimal() else 0, cached)


def client_of(app: ASGIApp, key: str) -> httpx.AsyncClient:
    """A client of an app in this process, which hears of requests that are given up, as it would over a connection."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        is_whole, gone = False, asyncio.Event()

        async def receive_or_hear() -> Message:
            nonlocal is_whole
            if is_whole:
                await gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            is_whole = not message.get("more_body", False)
            return message

        answering = asyncio.ensure_future(app(scope, receive_or_hear, send))
        try:
            await asyncio.shield(answering)
        finally:
            gone.set()

    return httpx.AsyncClient(
        transport=httpx.ASGITransport(call, raise_app_exceptions=False),
        base_url="http://engine",
        headers={"authorization": f"Bearer {key}"},
        timeout=None,
    )


def _prompt(request: Request) -> list[int]:
    """The prompt as the server reads it: what a response must start with has been said already."""
    return [*request.prompt_ids.tolist(), *request.forced_ids]


def _sampled(request: Request) -> int:
    """The most tokens that the server may sample."""
    return max(1, request.max_tokens - len(request.forced_ids))


def _form(request: Request) -> dict[str, Any] | None:
    """The form that responses must have, by kind; ChatError if they may be tool calls too: these servers cannot."""
    form: dict[str, Any] | None = orjson.loads(request.grammar) if request.grammar else None
    if form and "or_call" in form:
        raise ChatError(
            "This model server cannot hold replies to a form where tools are offered. Leave one of them out.",
            param="response_format",
            code="unsupported_parameter",
        )
    return form


def _sglang_form(form: Mapping[str, Any]) -> dict[str, Any]:
    """The form as SGLang names it."""
    written: dict[str, Any] = {}
    for kind, value in form.items():
        match kind:
            case "json" | "json_object":
                schema = value if kind == "json" else {"type": "object"}
                written["json_schema"] = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
            case "choice":
                written["regex"] = "|".join(f"({re.escape(text)})" for text in value)
            case "regex":
                written["regex"] = value
            case "grammar":
                written["ebnf"] = value
            case _:
                raise ChatError(f"{kind} is not supported: SGLang has no such form.", param="response_format")
    return written


def _vllm_likeliest(entry: Mapping[str, Any], top: int) -> dict[int, float]:
    """The ids and log-probabilities of vLLM's `token_id:ID` entries, best first."""
    shown = {int(other["token"].removeprefix("token_id:")): other["logprob"] for other in entry["top_logprobs"]}
    best = sorted(shown, key=lambda token: shown[token], reverse=True)[:top]
    return {token: shown[token] for token in best}


def _response(
    request: Request,
    ids: Sequence[int],
    logprobs: Sequence[float],
    likeliest: Sequence[dict[int, float]],
    word: str | None,
) -> Response:
    """A response of what was sampled, behind the tokens that were forced, which had no choice: log-probability 0."""
    if len(logprobs) != len(ids):
        raise EngineError(f"The model server gave {len(logprobs)} log-probabilities of {len(ids)} tokens.")
    forced, end = len(request.forced_ids), request.max_tokens
    reason = FinishReason.read(word, calls_tools=False)
    is_cut = forced + len(ids) > end
    return Response(
        ids=np.array([*request.forced_ids, *ids][:end], np.int32),
        logprobs=np.array([*[0.0] * forced, *logprobs][:end], np.float32),
        mask=np.arange(min(forced + len(ids), end)) >= forced if forced else None,
        finish_reason=FinishReason.LENGTH if is_cut else reason,
        likeliest=tuple([*[{}] * forced, *likeliest][:end]) if request.top else (),
    )


def _generated(request: Request, responses: Sequence[Response], version: int, reused: int) -> Generated:
    """The prompt is computed once, and found in the cache for the other responses."""
    length = len(request.prompt_ids) + len(request.forced_ids)
    computed = max(0, length - reused)
    return Generated(request, tuple(responses), version, computed, length * request.n - computed)


async def _post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """A model server's answer. ChatError in its own words if it refuses, EngineError if it does not answer."""
    try:
        reply = await client.post(path, content=orjson.dumps(body), headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        raise EngineError(f"The model server does not answer ({type(error).__name__}: {error}).") from error
    if reply.is_success:
        return reply
    try:
        problem = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        problem = None
    problem = problem.get("error", problem) if isinstance(problem, dict) else {"message": reply.text}
    message = problem.get("message", problem) if isinstance(problem, dict) else problem
    if reply.status_code >= 500:
        raise EngineError(f"The model server failed ({reply.status_code}): {message}")
    raise ChatError(f"The model server refuses this: {message}", code="model_server", status=reply.status_code)
