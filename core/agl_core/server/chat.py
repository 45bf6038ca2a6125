"""The dialect of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from agl_core.server.dialect import ModelRequest
from agl_core.server.faults import ApiError
from agl_core.server.reply import Reply
from agl_core.types import Json, Sampling

_PIECE = 80
"""Characters per streamed piece of content."""

_OWN = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"}
    | {"return_token_ids", "prompt_logprobs"}
)
"""Fields that the gateway sets itself or keeps from the upstream."""


class ChatCompletions:
    """`POST /v1/chat/completions`. The upstream never streams: what a client streams is made of the whole reply."""

    api = "chat.completions"

    def parse(self, raw: bytes) -> ModelRequest:
        body = _json_object(raw)
        for name, (check, expected) in _FIELDS.items():
            value = body.get(name)
            if value is not None and not check(value):
                raise _wrong(name, f"must be {expected}, not {_shown(value)}")
        if body.get("top_logprobs") is not None and not body.get("logprobs"):
            raise _wrong("top_logprobs", "needs 'logprobs': true", code="invalid_value")
        model = body.get("model")
        if model is None:
            raise _wrong("model", "is missing", code="missing_required_parameter")
        _check_messages(body.get("messages"))
        for place, tool in enumerate(body.get("tools") or ()):
            _check_tool(place, tool)
        limit = body.get("max_completion_tokens")
        return ModelRequest(
            body=body,
            chat={name: value for name, value in body.items() if name not in _OWN and value is not None},
            model=model,
            stream=bool(body.get("stream")),
            logprobs=bool(body.get("logprobs")),
            requested=Sampling(
                temperature=body.get("temperature"),
                top_p=body.get("top_p"),
                max_tokens=body.get("max_tokens") if limit is None else limit,
                seed=body.get("seed"),
            ),
        )

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        completion = {**reply.completion, "model": request.model}
        if not request.stream:
            return Response(orjson.dumps(completion), media_type="application/json")
        usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
        events = [b"data: %b\n\n" % orjson.dumps(chunk) for chunk in _chunks(completion, usage)]
        return Response(
            b"".join([*events, b"data: [DONE]\n\n"]),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    def refuse(self, error: ApiError) -> Response:
        body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return Response(orjson.dumps({"error": body}), status_code=error.status, media_type="application/json")


def _chunks(completion: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Json]]:
    """A finished reply as the chunks of a stream."""
    head = {name: value for name, value in completion.items() if name not in ("object", "choices", "usage")}
    head["object"] = "chat.completion.chunk"
    if usage:
        head["usage"] = None
    for choice in completion["choices"]:
        logprobs = choice["logprobs"]
        for delta in _deltas(choice["message"]):
            carried = None if "role" in delta else logprobs
            yield {**head, "choices": [_chunk_choice(choice, delta, carried, None)]}
            logprobs = None if carried else logprobs
        yield {**head, "choices": [_chunk_choice(choice, {}, logprobs, choice["finish_reason"])]}
    if usage:
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
    content = message.get("content") or ""
    for start in range(0, len(content), _PIECE):
        yield {"content": content[start : start + _PIECE]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        opening = {**call, "index": index, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [opening]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": function.get("arguments") or ""}}]}


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The request body must be a JSON object, not {_shown(body)}.", code="invalid_json")
    return body


def _check_messages(messages: Any) -> None:
    if not messages:
        raise _wrong("messages", "must be a list with at least one message", code="missing_required_parameter")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise _wrong(where, f"must be an object, not {_shown(message)}")
        if not isinstance(message.get("role"), str):
            raise _wrong(f"{where}.role", f"must be a string, not {_shown(message.get('role'))}")
        content = message.get("content")
        if not (content is None or isinstance(content, str) or _is_list_of(content, dict)):
            raise _wrong(f"{where}.content", f"must be a string or a list of parts, not {_shown(content)}")
        calls = message.get("tool_calls")
        if not (calls is None or _is_list_of(calls, dict)):
            raise _wrong(f"{where}.tool_calls", f"must be a list of objects, not {_shown(calls)}")


def _check_tool(place: int, tool: Mapping[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise _wrong(f"tools[{place}]", "must be of type 'function', with an object 'function'")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"tools[{place}].function.name", f"must be a string, not {_shown(function.get('name'))}")


def _wrong(param: str, problem: str, code: str = "invalid_type") -> ApiError:
    return ApiError(400, f"'{param}' {problem}.", param=param, code=code)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else text[:57] + "…"


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _is_int(low: int, high: int | None = None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value and (high is None or value <= high)


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or _is_list_of(value, str)


def _is_tool_choice(value: Any) -> bool:
    return value in ("none", "auto", "required") if isinstance(value, str) else isinstance(value, dict)


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is(str), "a string"),
    "messages": (_is(list), "a list of messages"),
    "tools": (lambda value: _is_list_of(value, dict), "a list of tools"),
    "tool_choice": (_is_tool_choice, "'none', 'auto', 'required' or an object that names a function"),
    "parallel_tool_calls": (_is(bool), "true or false"),
    "stream": (_is(bool), "true or false"),
    "stream_options": (_is(dict), "an object"),
    "n": (_is_int(1, 128), "an integer from 1 to 128"),
    "stop": (_is_stop, "a string or a list of strings"),
    "temperature": (_is_number(0, 2), "a number from 0 to 2"),
    "top_p": (_is_number(0, 1), "a number from 0 to 1"),
    "max_tokens": (_is_int(1), "an integer of at least 1"),
    "max_completion_tokens": (_is_int(1), "an integer of at least 1"),
    "seed": (lambda value: type(value) is int, "an integer"),
    "logprobs": (_is(bool), "true or false"),
    "top_logprobs": (_is_int(0, 20), "an integer from 0 to 20"),
    "response_format": (_is(dict), "an object"),
    "presence_penalty": (_is_number(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_is_number(-2, 2), "a number from -2 to 2"),
    "logit_bias": (_is(dict), "an object"),
    "user": (_is(str), "a string"),
    "metadata": (_is(dict), "an object"),
}
"""Fields whose types are checked here; all others are passed on as they are."""
