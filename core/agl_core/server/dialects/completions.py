"""The dialect of OpenAI's legacy completions.

The upstream speaks chat completions only, and so does what is recorded: **a prompt becomes the one user message of a
chat**. The model therefore sees its chat template around the prompt and answers it; it does not continue a bare text.
This is what an agent needs that puts everything into one prompt, for example a text ReAct loop. Token ids and
log-probabilities are exactly those of the model's input and output. What only a continuation could mean (`echo`,
`suffix`, prompts of token ids) is refused, and so are several prompts in one request and `best_of`, which samples more
than it returns. Without `max_tokens` the run's limit holds, not the 16 tokens of OpenAI's servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from starlette.responses import Response

from agl_core.server.dialects import fields
from agl_core.server.dialects.chat import openai_error
from agl_core.server.dialects.dialect import ModelRequest, asked, rendered, returned, usages
from agl_core.server.dialects.replies import ReplyMemory
from agl_core.server.dialects.sse import chunk_stream, pieces
from agl_core.server.errors import ApiError
from agl_core.server.gateway.reply import Reply
from agl_core.types import Json


class Completions:
    """`POST /v1/completions`."""

    api = "completions"
    id_prefix = "cmpl-"
    counts = False

    def parse(self, raw: bytes, memory: ReplyMemory) -> ModelRequest:
        body = fields.json_object(raw)
        fields.check_fields(body, _FIELDS)
        for name, (neutral, why) in _NOT_SERVED.items():
            if body.get(name) is not None and not fields.is_one_of(body[name], neutral):
                raise fields.unsupported(name, f"= {fields.shown(body[name])} {why}")
        prompt = _prompt(fields.need(body, "prompt"))
        logprobs = body.get("logprobs")
        translated = {
            "messages": [{"role": "user", "content": prompt}],
            **({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}),
        }
        passed = {name: value for name, value in body.items() if name not in _TRANSLATED}
        return asked(
            body,
            {**passed, **translated},
            {**{name: value for name, value in body.items() if name != "prompt"}, **translated},
            max_tokens=body.get("max_tokens"),
            logprobs=logprobs is not None,
            returns=True,
        )

    def render(self, request: ModelRequest, reply: Reply, memory: ReplyMemory) -> Response:
        completion = {**reply.completion, "object": "text_completion", "model": request.model}
        of_prompt, of_choices = returned(request, reply)
        choices: Any = reply.completion["choices"]
        completion["choices"] = [
            {**_choice(choice), **of_prompt, **more} for choice, more in zip(choices, of_choices, strict=True)
        ]
        if not request.stream:
            return rendered(completion)
        return chunk_stream(_chunks(completion, *usages(request, completion.get("usage"))))

    def refuse(self, error: ApiError) -> Response:
        return openai_error(error)


def _prompt(prompt: Json) -> str:
    """The one prompt; clients that can send several send a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    fields.must(isinstance(prompt, list) and len(prompt) > 0, "prompt", "a string", prompt)
    if all(isinstance(each, str) for each in prompt):
        raise fields.unsupported(
            "prompt", f"has {len(prompt)} texts: send each in a request of its own, so that each is a call"
        )
    raise fields.unsupported("prompt", "must be text: token ids mean nothing without the tokenizer they come from")


def _choice(choice: Mapping[str, Any]) -> dict[str, Json]:
    reason = choice["finish_reason"]
    return {
        "index": choice["index"],
        "text": choice["message"].get("content") or "",
        "logprobs": _logprobs(choice["logprobs"]),
        "finish_reason": reason if reason in ("length", "content_filter") else "stop",
    }


def _logprobs(logprobs: Mapping[str, Any] | None) -> dict[str, Json] | None:
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


def _chunks(
    completion: Mapping[str, Any], usage: Mapping[str, Json], ends_with_usage: bool
) -> Iterator[dict[str, Json]]:
    """A finished reply as the chunks of a stream. All but the text of a choice is in its first chunk."""
    head = {**{name: value for name, value in completion.items() if name not in ("choices", "usage")}, **usage}
    for choice in completion["choices"]:
        carried = {name: value for name, value in choice.items() if name not in ("text", "finish_reason")}
        for piece in pieces(choice["text"]):
            yield {**head, "choices": [{**carried, "text": piece, "finish_reason": None}]}
            carried = {"index": choice["index"], "logprobs": None}
        yield {**head, "choices": [{**carried, "text": "", "finish_reason": choice["finish_reason"]}]}
    if ends_with_usage:
        yield {**head, "choices": [], "usage": completion.get("usage")}


_FIELDS: fields.Fields = {
    **fields.COMMON,
    **fields.SAMPLING,
    "max_tokens": (fields.is_int(1), "an integer of at least 1"),
    "n": (fields.is_int(1, 128), "an integer from 1 to 128"),
    "logprobs": (fields.is_int(0, 5), "an integer from 0 to 5"),
    **fields.RETURNED,
}
_NOT_SERVED: Mapping[str, tuple[tuple[Json, ...], str]] = {
    "echo": ((False,), "would repeat a prompt that the model did not see like this: put it before the text yourself"),
    "suffix": (("",), "needs a model that fills in, and a chat model does not. Leave it out"),
    "best_of": ((1,), "samples more than it returns: use 'n', and choose among the choices"),
    "max_completion_tokens": ((), "is no field of completions; use 'max_tokens'"),
    "messages": ((), "is no field of completions; use 'prompt', or /v1/chat/completions"),
    "tools": (([],), "is no field of completions; use /v1/chat/completions"),
}
"""Fields that cannot be served, the values with which they ask for nothing, and why."""
_TRANSLATED = frozenset({"prompt", "logprobs", *_NOT_SERVED})
