"""The dialect of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from agl_core.server.dialects import fields
from agl_core.server.dialects.dialect import ModelRequest, asked, rendered, returned, usages
from agl_core.server.dialects.replies import ReplyMemory
from agl_core.server.dialects.sse import chunk_stream, pieces
from agl_core.server.errors import ApiError
from agl_core.server.gateway.reply import Reply
from agl_core.types import Json


class ChatCompletions:
    """`POST /v1/chat/completions`: the API that the upstream speaks itself."""

    api = "chat.completions"
    id_prefix = "chatcmpl-"
    counts = False

    def parse(self, raw: bytes, memory: ReplyMemory) -> ModelRequest:
        body = fields.json_object(raw)
        fields.check_fields(body, _FIELDS)
        if body.get("top_logprobs") is not None and not body.get("logprobs"):
            raise fields.wrong("top_logprobs", "needs 'logprobs': true", code="invalid_value")
        _check_messages(body.get("messages"))
        for place, tool in enumerate(body.get("tools") or ()):
            _check_tool(place, tool)
        limit = body.get("max_completion_tokens")
        return asked(
            body,
            body,
            body,
            max_tokens=body.get("max_tokens") if limit is None else limit,
            logprobs=bool(body.get("logprobs")),
            returns=True,
        )

    def render(self, request: ModelRequest, reply: Reply, memory: ReplyMemory) -> Response:
        of_prompt, of_choices = returned(request, reply)
        completion = {**reply.completion, "model": request.model}
        raw: Any = reply.completion["choices"]
        if not request.stream:
            completion["choices"] = [{**choice, **more} for choice, more in zip(raw, of_choices, strict=True)]
            return rendered({**completion, **of_prompt})
        return chunk_stream(_chunks(completion, of_prompt, of_choices, *usages(request, completion.get("usage"))))

    def refuse(self, error: ApiError) -> Response:
        return openai_error(error)


def openai_error(error: ApiError) -> Response:
    """An error in the shape that all of OpenAI's APIs share."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return Response(orjson.dumps({"error": body}), error.status, error.headers, "application/json")


def _chunks(
    completion: Mapping[str, Any],
    of_prompt: Mapping[str, Json],
    of_choices: Sequence[Mapping[str, Json]],
    usage: Mapping[str, Json],
    ends_with_usage: bool,
) -> Iterator[dict[str, Json]]:
    """A finished reply as the chunks of a stream. What it says of the prompt is in the first chunk."""
    head = {name: value for name, value in completion.items() if name not in ("object", "choices", "usage")}
    head |= {"object": "chat.completion.chunk", **usage}
    for choice, more in zip(completion["choices"], of_choices, strict=True):
        logprobs = choice["logprobs"]
        for delta in _deltas(choice["message"]):
            carried = None if "role" in delta else logprobs
            yield {**head, **of_prompt, "choices": [_chunk_choice(choice, delta, carried, None)]}
            logprobs, of_prompt = None if carried else logprobs, {}
        yield {**head, "choices": [{**_chunk_choice(choice, {}, logprobs, choice["finish_reason"]), **more}]}
    if ends_with_usage:
        yield {**head, "choices": [], "usage": completion.get("usage")}


def _chunk_choice(
    choice: Mapping[str, Any], delta: Mapping[str, Json], logprobs: Json, finish_reason: str | None
) -> dict[str, Json]:
    return {"index": choice["index"], "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


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


def _check_messages(messages: Any) -> None:
    if not messages:
        raise fields.wrong("messages", "must be a list with at least one message", code="missing_required_parameter")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        fields.must(isinstance(message, dict), where, "an object", message)
        fields.must(isinstance(message.get("role"), str), f"{where}.role", "a string", message.get("role"))
        fields.check_fields(message, _OF_MESSAGES, f"{where}.")


def _check_tool(place: int, tool: Mapping[str, Any]) -> None:
    """A function's description is checked; the model server decides whether it takes other tools."""
    kind: Any = tool.get("type")
    function: Any = tool.get("function")
    fields.must(isinstance(kind, str), f"tools[{place}].type", "a string ('function', say)", kind)
    if kind != "function":
        return
    fields.must(isinstance(function, dict), f"tools[{place}].function", "an object", function)
    name = function.get("name")
    fields.must(isinstance(name, str), f"tools[{place}].function.name", "a string", name)
    fields.check_fields(function, fields.FUNCTION, f"tools[{place}].function.")


def _is_tool_choice(value: Any) -> bool:
    return value in ("none", "auto", "required") if isinstance(value, str) else isinstance(value, dict)


_OF_MESSAGES: fields.Fields = {
    "content": (
        lambda value: isinstance(value, str) or fields.is_list_of(value, dict),
        "a string or a list of parts",
    ),
    "tool_calls": (lambda value: fields.is_list_of(value, dict), "a list of objects"),
}
_FIELDS: fields.Fields = {
    **fields.COMMON,
    **fields.SAMPLING,
    "messages": (fields.is_a(list), "a list of messages"),
    "tools": (lambda value: fields.is_list_of(value, dict), "a list of tools"),
    "tool_choice": (_is_tool_choice, "'none', 'auto', 'required' or an object that names a function"),
    "parallel_tool_calls": (fields.is_a(bool), "true or false"),
    "n": (fields.is_int(1, 128), "an integer from 1 to 128"),
    "max_tokens": (fields.is_int(1), "an integer of at least 1"),
    "max_completion_tokens": (fields.is_int(1), "an integer of at least 1"),
    "logprobs": (fields.is_a(bool), "true or false"),
    "top_logprobs": (fields.is_int(0, 20), "an integer from 0 to 20"),
    "response_format": (fields.is_a(dict), "an object"),
    **fields.RETURNED,
}
"""Fields whose types are checked here; all others are passed on as they are."""
