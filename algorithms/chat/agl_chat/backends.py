"""Back ends, which sample for the chat layer: what one is asked and answers, and those over HTTP, vLLM and SGLang.

These two ask for a stream if somebody watches. They give log-probabilities at the sampling temperature if they are
started so: vLLM with `--enable-scale-out --logprobs-mode processed_logprobs`, as veRL's servers are, and SGLang by
default.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import httpx
import numpy as np
import orjson

from agl_core.apis.dialect import unsupported
from agl_core.apis.errors import ApiError, read_error
from agl_core.apis.streams import STREAM_TYPE
from agl_core.errors import EngineError
from agl_core.types import FinishReason, Logprobs, Tokens


class SampledToken(NamedTuple):
    """One token of a response; a tuple, because one is made for each."""

    choice: int
    id: int
    logprob: float
    """log-softmax(logits / temperature) at the id, over all tokens that the grammar allows."""
    likeliest: Mapping[int, float] = MappingProxyType({})
    """The likeliest ids at its position and their log-probabilities, best first; empty if not asked for."""
    is_free: bool = True
    """False where it was forced, or the only one that the grammar allows."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response, all of it from one version of the weights."""

    tokens: Sequence[SampledToken]
    """Exactly as sampled, the end token included."""
    finish_reason: FinishReason
    """STOP, LENGTH, or ABORTED by an engine of its own accord."""

    @property
    def ids(self) -> Tokens:
        return np.array([token.id for token in self.tokens], np.int32)

    @property
    def logprobs(self) -> Logprobs:
        return np.array([token.logprob for token in self.tokens], np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    request: Request
    responses: tuple[Response, ...]
    version: int
    prefilled: int
    """Prompt tokens computed, summed over the responses."""
    reused: int
    """Prompt tokens taken from the cache, summed over the responses."""


class Backend(Protocol):
    """An engine: tokens in, tokens out."""

    async def generate(self, request: Request) -> Generation:
        """Answer a request; cancelling it frees its place. EngineError if the engine cannot answer."""


VLLM_MAX_LOGPROBS = 20
"""Log-probabilities that vLLM gives for each position by default, at most."""


class HttpBackend(ABC):
    """A server's own route for tokens; the client has its URL and key. A response also ends at one of `end_ids`."""

    path: ClassVar[str]

    def __init__(self, client: httpx.AsyncClient, end_ids: Collection[int] = ()) -> None:
        self._client, self._end_ids = client, sorted(end_ids)

    async def generate(self, request: Request) -> Generation:
        """See `Backend`. Cancelling it closes the connection, by which the server ends the sampling."""
        responses = _Responses(request)
        async with aclosing(self.ask({"stream": request.watch is not None, **self._body(request)})) as answers:
            async for answer in answers:
                try:
                    self._read(answer, responses)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise _unreadable(error, answer) from error
        return responses.generated()

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The server's reply as JSON, or each event of a stream. ApiError if it refuses, EngineError if it fails."""
        headers = {"content-type": "application/json"}
        try:
            async with self._client.stream("POST", self.path, content=orjson.dumps(body), headers=headers) as reply:
                if reply.headers.get("content-type", "").startswith(STREAM_TYPE):
                    async for answer in read_events(reply.aiter_lines()):
                        yield answer
                    return
                content = await reply.aread()
                if not reply.is_success:
                    raise failure(reply.status_code, content)
                yield _json(content)
        except httpx.HTTPError as error:
            raise EngineError(f"The model server does not answer ({type(error).__name__}: {error}).") from error

    @abstractmethod
    def _body(self, request: Request) -> dict[str, Any]:
        """The request as the server takes it."""

    @abstractmethod
    def _read(self, answer: Any, responses: _Responses) -> None:
        """Take the server's answer, or an event of its stream."""


class VllmBackend(HttpBackend):
    """vLLM's route. All replies are of version 0."""

    path = "/inference/v1/generate"

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = {
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "max_tokens": _sampled(request),
            "stop": list(request.stops),
            "stop_token_ids": self._end_ids,
            # It detokenises only to find stop strings; markers of tool calls can be special tokens.
            "skip_special_tokens": False,
            "detokenize": bool(request.stops),
            # The sampled token counts as one of them, even where it is not among the likeliest.
            "logprobs": min(request.top + 1, VLLM_MAX_LOGPROBS) if request.top else 0,
            **({"structured_outputs": form} if (form := _form(request)) else {}),
            **request.distortions,
        }
        return {
            "request_id": request.id,
            "model": request.model,
            "token_ids": _prompt(request),
            "sampling_params": sampling,
            "stream_options": {"include_usage": True},
            # A stream of several responses breaks off in vLLM 0.31, if they do not all begin at once.
            **({"stream": False} if request.n > 1 else {}),
        }

    def _read(self, answer: Any, responses: _Responses) -> None:
        for choice in answer["choices"]:
            pairs, top = zip(choice["token_ids"], choice["logprobs"]["content"], strict=True), responses.request.top
            tokens = [(token, entry["logprob"], _vllm_likeliest(entry, top)) for token, entry in pairs]
            responses.add(choice["index"], tokens, choice["finish_reason"])
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        responses.reused[0] = details.get("cached_tokens") or 0


class SglangBackend(HttpBackend):
    """SGLang's own route. A reply is of the version that `weight_version` names, if it is a number, else of version 0.

    SGLang goes by the seed only where it was started with `--enable-deterministic-inference`.
    """

    path = "/generate"

    def _body(self, request: Request) -> dict[str, Any]:
        if "allowed_token_ids" in request.distortions:
            raise unsupported("allowed_token_ids", "is not supported: SGLang has no such field. Leave it out")
        sampling = {
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            # The model's generation_config.json holds for a field that is not named.
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
        return {
            "rid": request.id,
            "input_ids": _prompt(request),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": request.top,
        }

    def _read(self, answer: Any, responses: _Responses) -> None:
        for position, choice in enumerate(answer if isinstance(answer, list) else [answer]):
            info, index = choice["meta_info"], choice.get("index", position)
            # An event has all tokens so far, or those since the event before, as the server was started.
            entries = info["output_token_logprobs"]
            new = info.get("output_token_logprobs_length", len(entries)) - responses.count(index)
            top = [{token: logprob for logprob, token, *_ in of or ()} for of in info.get("output_top_logprobs") or ()]
            columns = zip(entries, top or [{}] * len(entries), strict=True)
            tokens = [(token, logprob, likeliest) for (logprob, token, *_), likeliest in columns]
            responses.add(index, tokens[len(tokens) - new :], (info["finish_reason"] or {}).get("type"))
            version = str(info.get("weight_version", ""))
            responses.version = int(version) if version.isdecimal() else 0
            responses.reused[index] = info.get("cached_tokens") or 0


class _Responses:
    """The responses to a request, as they come."""

    def __init__(self, request: Request) -> None:
        self.request, self.version = request, 0
        self.reused = [0] * request.n
        """Prompt tokens that each has from the cache."""
        self._tokens = [list[SampledToken]() for _ in range(request.n)]
        self._reasons: list[str | None] = [None] * request.n

    def count(self, choice: int) -> int:
        """Tokens of a response that the server has sampled."""
        return max(0, len(self._tokens[choice]) - len(self.request.forced_ids))

    def add(self, choice: int, sampled: Sequence[tuple[int, float, Mapping[int, float]]], reason: str | None) -> None:
        """More of a response (ids, log-probabilities, the likeliest), and the server's word for its end if it ends."""
        known, limit = self._tokens[choice], self.request.max_tokens
        forced = () if known else self.request.forced_ids  # They had no choice: log-probability 0.
        tokens = [SampledToken(choice, token, 0.0, is_free=False) for token in forced]
        tokens += [SampledToken(choice, *columns) for columns in sampled]
        self._reasons[choice] = "length" if len(known) + len(tokens) > limit else reason
        for token in tokens[: limit - len(known)]:
            known.append(token)
            if self.request.watch:
                self.request.watch(token)

    def generated(self) -> Generation:
        """All of them, once nothing more comes."""
        request = self.request
        # vLLM's streams do not say that a response was aborted.
        reasons = [FinishReason.read(reason or "abort", calls_tools=False) for reason in self._reasons]
        responses = map(Response, self._tokens, reasons)
        # The prompt is computed once, and found in the cache for the other responses.
        length = len(_prompt(request))
        computed = max(0, length - sum(self.reused))
        return Generation(request, tuple(responses), self.version, computed, length * request.n - computed)


def _prompt(request: Request) -> list[int]:
    """The prompt as the server reads it: what a response must start with has been said already."""
    return [*request.prompt_ids.tolist(), *request.forced_ids]


def _sampled(request: Request) -> int:
    """The most tokens that the server may sample."""
    return max(1, request.max_tokens - len(request.forced_ids))


def _form(request: Request) -> dict[str, Any] | None:
    """The form that responses must have, by kind; ApiError if they may be tool calls too: these servers cannot."""
    form: dict[str, Any] | None = orjson.loads(request.grammar) if request.grammar else None
    if form and "or_call" in form:
        raise unsupported("response_format", "is not supported where tools are offered: leave one of them out")
    return form


def _sglang_form(form: Mapping[str, Any]) -> dict[str, Any]:
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
                raise unsupported("response_format", f"{kind} is not supported: SGLang has no such form")
    return written


def _vllm_likeliest(entry: Mapping[str, Any], top: int) -> dict[int, float]:
    """The ids and log-probabilities of vLLM's `token_id:ID` entries, best first."""
    shown = {int(other["token"].removeprefix("token_id:")): other["logprob"] for other in entry["top_logprobs"]}
    best = sorted(shown, key=lambda token: shown[token], reverse=True)[:top]
    return {token: shown[token] for token in best}


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[Any, None]:
    """The JSON of a model server's events. ApiError or EngineError if one tells of an error, or the last is missing.

    `lines` have an event at most each.
    """
    async for line in lines:
        event = line.removeprefix("data:").strip()
        if event == "[DONE]":
            return
        if event:
            answer = _json(event)
            if "error" in answer:
                raise failure(200, event.encode())
            yield answer
    raise EngineError("The model server broke off its reply.")


def _json(content: bytes | str) -> Any:
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise _unreadable(error, content) from error


def _unreadable(error: Exception, content: Any) -> EngineError:
    problem = f"{type(error).__name__}: {error}"
    return EngineError(f"The model server's reply cannot be read ({problem}). It begins with {str(content)[:80]!r}.")


def failure(status: int, content: bytes) -> Exception:
    """The error that a model server answers with, or tells of in a stream that began with status 200."""
    problem = read_error(content)
    message, code = problem.get("message") or content.decode("utf-8", "replace"), problem.get("code")
    status = status if status != 200 else code if isinstance(code, int) else 500
    if status >= 500:
        return EngineError(f"The model server failed ({status}): {message}")
    return ApiError(status, f"The model server refuses this: {message}", code="model_server")
