"""OpenAI's chat completions, which the upstream speaks itself, and its legacy completions.

Of a completion, **a prompt becomes the one user message of a chat**, for the upstream and in what is recorded. The
model therefore sees its chat template around the prompt and answers it; it does not continue a bare text. This is what
an agent needs that puts everything into one prompt, for example a text ReAct loop. Token ids and log-probabilities are
exactly those of the model's input and output. What only a continuation could mean (`echo`, `suffix`, prompts of token
ids) is refused, and so are several prompts in one request and `best_of`, which samples more than it returns. Without
`max_tokens` the run's limit holds, not the 16 tokens of OpenAI's servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from agl_core.apis.answered import Answered
from agl_core.apis.dialect import (
    Dialect,
    ModelRequest,
    Translation,
    chunk_stream,
    pieces,
    rendered,
    unsupported,
    wrong,
)
from agl_core.apis.reply import Reply
from agl_core.types import Json


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    api, id_prefix = "chat.completions", "chatcmpl-"

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        logprobs = body.get("logprobs")
        if not isinstance(logprobs, bool | None) or (body.get("top_logprobs") is not None and not logprobs):
            raise wrong("logprobs", "must be true or false, and true where there are 'top_logprobs'")
        limit = body.get("max_completion_tokens")
        return Translation({}, body.get("max_tokens") if limit is None else limit, bool(logprobs))

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        of_prompt, of_choices = _returned(request, reply)
        completion = {**reply.completion, "model": request.model}
        choices: Any = reply.completion["choices"]
        if not request.stream:
            completion["choices"] = [{**choice, **more} for choice, more in zip(choices, of_choices, strict=True)]
            return rendered({**completion, **of_prompt})
        head = {name: value for name, value in completion.items() if name not in ("object", "choices", "usage")}
        head["object"] = "chat.completion.chunk"
        return _with_usage(request, head, _chat_chunks(choices, of_prompt, of_choices), completion.get("usage"))


class Completions(Dialect):
    """`POST /v1/completions`."""

    api, id_prefix = "completions", "cmpl-"
    refused = frozenset({"echo", "suffix", "max_completion_tokens", "messages", "tools"})
    rewritten = frozenset({"prompt"})
    kept = frozenset({"logprobs", "best_of"})

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        prompt, logprobs = body["prompt"], body.get("logprobs")
        if isinstance(prompt, list) and len(prompt) == 1:  # Clients that can send several send a list of one.
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise unsupported("prompt", "must be one text: each of several needs a request of its own")
        if body.get("best_of") not in (None, 1):
            raise unsupported("best_of", "samples more than it returns: use 'n', and choose among the choices")
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= 5):
            raise wrong("logprobs", "must be an integer from 0 to 5")
        chat: dict[str, Json] = {"messages": [{"role": "user", "content": prompt}]}
        if logprobs is not None:
            chat |= {"logprobs": True, "top_logprobs": logprobs}
        return Translation(chat, body.get("max_tokens"), logprobs is not None)

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        of_prompt, of_choices = _returned(request, reply)
        raw: Any = reply.completion["choices"]
        choices = [{**_text_choice(choice), **of_prompt, **more} for choice, more in zip(raw, of_choices, strict=True)]
        completion = {**reply.completion, "object": "text_completion", "model": request.model, "choices": choices}
        if not request.stream:
            return rendered(completion)
        head = {name: value for name, value in completion.items() if name not in ("choices", "usage")}
        return _with_usage(request, head, _text_chunks(choices), completion.get("usage"))


def _returned(request: ModelRequest, reply: Reply) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    """The token ids and the prompt's log-probabilities, if the agent asks for them: of the prompt, and of each choice.

    They are null where the model server gave none.
    """
    of_prompt: dict[str, Json] = {}
    of_choices: list[dict[str, Json]] = [{} for _ in reply.choices]
    if request.body.get("return_token_ids"):
        of_prompt["prompt_token_ids"] = None if reply.prompt_ids is None else reply.prompt_ids.tolist()
        of_choices = [
            {"token_ids": None if choice.response_ids is None else choice.response_ids.tolist()}
            for choice in reply.choices
        ]
    if request.body.get("prompt_logprobs") is not None:
        of_prompt["prompt_logprobs"] = reply.prompt_logprobs
    return of_prompt, of_choices


def _with_usage(
    request: ModelRequest, head: Mapping[str, Json], chunks: Iterator[Mapping[str, Json]], usage: Json
) -> Response:
    """Chunks as a stream. The whole reply is known, so each can say how many tokens it has, if the client asks."""
    options: Any = request.body.get("stream_options") or {}
    if not options.get("include_usage"):
        return chunk_stream({**head, **chunk} for chunk in chunks)
    so_far = {"usage": usage if options.get("continuous_usage_stats") else None}
    return chunk_stream([*({**head, **so_far, **chunk} for chunk in chunks), {**head, "choices": [], "usage": usage}])


def _chat_chunks(
    choices: Sequence[Mapping[str, Any]], of_prompt: Mapping[str, Json], of_choices: Sequence[Mapping[str, Json]]
) -> Iterator[dict[str, Json]]:
    """Chat choices as the chunks of a stream. What is said of the prompt is in the first chunk."""
    for choice, more in zip(choices, of_choices, strict=True):
        index, logprobs = choice["index"], choice["logprobs"]
        for delta in _deltas(choice["message"]):
            carried = None if "role" in delta else logprobs
            yield {
                **of_prompt,
                "choices": [{"index": index, "delta": delta, "logprobs": carried, "finish_reason": None}],
            }
            logprobs, of_prompt = None if carried else logprobs, {}
        end = {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}
        yield {"choices": [{**end, **more}]}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """Role first, then whatever else the message has, its content in pieces, its tool calls one by one."""
    yield {"role": "assistant", "content": None if message.get("content") is None else ""}
    others = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content", "tool_calls") and value not in (None, [], {})
    }
    if others:
        yield others
    for piece in pieces(message.get("content") or ""):
        yield {"content": piece}
    for index, call in enumerate(message.get("tool_calls") or ()):
        kind, written = ("custom", "input") if call.get("type") == "custom" else ("function", "arguments")
        yield {"tool_calls": [{**call, "index": index, kind: {**call[kind], written: ""}}]}
        yield {"tool_calls": [{"index": index, kind: {written: call[kind][written]}}]}


def _text_choice(choice: Mapping[str, Any]) -> dict[str, Json]:
    reason = choice["finish_reason"]
    return {
        "index": choice["index"],
        "text": choice["message"].get("content") or choice["message"].get("refusal") or "",
        "logprobs": _text_logprobs(choice["logprobs"]),
        "finish_reason": reason if reason in ("length", "content_filter") else "stop",
    }


def _text_logprobs(logprobs: Mapping[str, Any] | None) -> dict[str, Json] | None:
    """In the older shape: one list per kind of value."""
    if logprobs is None:
        return None
    entries = logprobs.get("content") or ()
    tokens = [entry.get("token") or "" for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {other.get("token") or "": other.get("logprob") for other in entry.get("top_logprobs") or ()}
            for entry in entries
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
    }


def _text_chunks(choices: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Json]]:
    """Text choices as the chunks of a stream. All but the text of a choice is in its first chunk."""
    for choice in choices:
        carried = {name: value for name, value in choice.items() if name not in ("text", "finish_reason")}
        for piece in pieces(choice["text"]):
            yield {"choices": [{**carried, "text": piece, "finish_reason": None}]}
            carried = {"index": choice["index"], "logprobs": None}
        yield {"choices": [{**carried, "text": "", "finish_reason": choice["finish_reason"]}]}
