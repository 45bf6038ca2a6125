"""The dialect of Anthropic's Messages API.

`system` becomes a system message, each `tool_result` a `tool` message; the model does not see `is_error`, but it is
recorded, as the `status` of that message, and decides what became of the tool. `stop_sequences` becomes `stop`,
`output_config` becomes `response_format` and `reasoning_effort`; hints about caching are ignored. Whether and how much
a model thinks is its chat template's affair here, so `thinking` is ignored too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
from starlette.responses import Response

from agl_core.server.dialects import fields
from agl_core.server.dialects.dialect import ModelRequest, asked, rendered
from agl_core.server.dialects.messages_input import read_messages, read_system, read_tool, tool_input, unmarked
from agl_core.server.dialects.replies import ReplyMemory
from agl_core.server.dialects.sse import event_stream, pieces
from agl_core.server.errors import ApiError
from agl_core.server.gateway.reply import Reply, reasoning_of
from agl_core.types import FinishReason, Json


class Messages:
    """`POST /v1/messages`. Anthropic's client adds `/v1` itself: its base URL is the attempt's without it."""

    id_prefix = "msg_"

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.api = "messages/count_tokens" if counts else "messages"

    def parse(self, raw: bytes, memory: ReplyMemory) -> ModelRequest:
        body = fields.json_object(raw)
        fields.check_fields(body, _FIELDS)
        _refuse(body)
        limit = 1 if self.counts else fields.need(body, "max_tokens")
        ignored = {name for name in _IGNORED if body.get(name) is not None}
        messages = [*read_system(body.get("system")), *read_messages(fields.need(body, "messages"), memory, ignored)]
        chat = {
            **{name: value for name, value in body.items() if name not in _TRANSLATED and value is not None},
            **_translated(body, ignored),
        }
        recorded = {**{name: value for name, value in body.items() if name not in _REWRITTEN}, **chat}
        request = asked(
            body,
            {**chat, "messages": unmarked(messages)},
            {**recorded, "messages": messages},
            max_tokens=limit,
            ignored=ignored,
        )
        return replace(request, requested=replace(request.requested, seed=None))  # This API has none.

    def render(self, request: ModelRequest, reply: Reply, memory: ReplyMemory) -> Response:
        if self.counts:
            return rendered({"input_tokens": reply.usage.prompt})
        message = _message(request, reply)
        if request.stream:
            return event_stream(_stream_events(message))
        return rendered(message)

    def refuse(self, error: ApiError) -> Response:
        default = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ERRORS.get(error.status, default)
        # Clients know a prompt that is too long by this beginning.
        message = f"prompt is too long: {error.message}" if error.is_context_overflow else error.message
        shown_error: dict[str, Json] = {"type": kind, "message": message}
        if error.code is not None:
            shown_error["details"] = {"error_code": error.code}
        body = {"type": "error", "error": shown_error}
        return Response(orjson.dumps(body), error.status, error.headers, "application/json")


def _refuse(body: Mapping[str, Any]) -> None:
    for name, instead in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise fields.unsupported(name, f"is no field of the Messages API; use {instead}")
    for name in _NOT_SERVED:
        if body.get(name):
            raise fields.unsupported(name, "needs Anthropic's own servers. Leave it out")
    if body.get("thread"):
        # Anthropic's tool runner asks for one, and after this very code it sends whole conversations instead.
        raise fields.wrong("thread", "is not served: send the whole conversation", code="thread_unsupported_request")


def _translated(body: Mapping[str, Any], ignored: set[str]) -> dict[str, Json]:
    """The fields that chat completions name or write differently, without those that are unset."""
    choice, output = body.get("tool_choice") or {}, body.get("output_config") or {}
    fields.check_fields(choice, _CHOICE_FIELDS, "tool_choice.")
    fields.check_fields(output, _OUTPUT_FIELDS, "output_config.")
    ignored.update(f"output_config.{name}" for name in output if name not in _OUTPUT_FIELDS)
    tools = fields.each_object(body.get("tools") or [], "tools")
    chat = {
        "tools": [read_tool(place, tool, ignored) for place, tool in tools] or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "stop": body.get("stop_sequences") or None,
        "response_format": _response_format(output.get("format")),
        "reasoning_effort": output.get("effort"),
    }
    return {name: value for name, value in chat.items() if value is not None}


def _tool_choice(choice: Mapping[str, Any]) -> Json:
    kind: Any = choice.get("type")
    if not choice:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": fields.need_text(choice, "name", "tool_choice.")}}
    fields.must(isinstance(kind, str) and kind in _CHOICES, "tool_choice.type", "'auto', 'any', 'tool' or 'none'", kind)
    return _CHOICES[str(kind)]


def _response_format(wanted: Mapping[str, Any] | None) -> Json:
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise fields.wrong(
            "output_config.format.type", f"must be 'json_schema', not {fields.shown(wanted.get('type'))}"
        )
    schema = fields.need(wanted, "schema", "output_config.format.")
    fields.must(isinstance(schema, dict), "output_config.format.schema", "an object", schema)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _message(request: ModelRequest, reply: Reply) -> dict[str, Json]:
    choice, usage = reply.choices[0], reply.usage
    calls = choice.message.get("tool_calls") or ()
    reason = _STOP_REASONS[choice.finish_reason]
    if choice.finish_reason is FinishReason.STOP:
        reason = "tool_use" if calls else "stop_sequence" if reply.stop_sequence else reason
    return {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(choice.message, reply.id),
        "stop_reason": reason,
        "stop_sequence": reply.stop_sequence if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": max(0, usage.prompt - usage.cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        },
    }


def _blocks(message: Mapping[str, Any], reply_id: str) -> list[dict[str, Json]]:
    blocks: list[dict[str, Json]] = []
    reasoning = reasoning_of(message)
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, call_id = call["function"], call.get("id") or f"toolu_{reply_id}_{number}"
        arguments = tool_input(function["arguments"])
        blocks.append({"type": "tool_use", "id": call_id, "name": function["name"], "input": arguments})
    return blocks


def _stream_events(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """A finished message as the events of a stream, from `message_start` to `message_stop`."""
    usage = message["usage"]
    started = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**started, "stop_sequence": None}}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _opened(block: Mapping[str, Any]) -> dict[str, Json]:
    return {**block, "input": {}} if block["type"] == "tool_use" else {**block, block["type"]: ""}


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    kind = block["type"]
    if kind == "tool_use":
        for piece in pieces(orjson.dumps(block["input"]).decode()):
            yield {"type": "input_json_delta", "partial_json": piece}
    else:
        for piece in pieces(block[kind]):
            yield {"type": f"{kind}_delta", kind: piece}


_FIELDS: fields.Fields = {
    **fields.COMMON,
    "max_tokens": (fields.is_int(1), "an integer of at least 1"),
    "messages": (fields.is_a(list), "a list of messages"),
    "system": (lambda value: isinstance(value, str | list), "a string or a list of text blocks"),
    "temperature": (fields.is_number(0, 1), "a number from 0 to 1"),
    "top_p": (fields.is_number(0, 1), "a number from 0 to 1"),
    "top_k": (fields.is_int(0), "an integer of at least 0"),
    "stop_sequences": (lambda value: fields.is_list_of(value, str), "a list of strings"),
    "tools": (fields.is_a(list), "a list of tools"),
    "tool_choice": (fields.is_a(dict), "an object with a 'type'"),
    "output_config": (fields.is_a(dict), "an object"),
}
_CHOICE_FIELDS: fields.Fields = {"disable_parallel_tool_use": (fields.is_a(bool), "true or false")}
_OUTPUT_FIELDS: fields.Fields = {"format": (fields.is_a(dict), "an object"), "effort": (fields.is_a(str), "a string")}
_REWRITTEN = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "output_config"})
"""Fields that are recorded as a chat completion has them."""
_IGNORED = frozenset(
    {"billing_policy", "compaction", "context_management", "diagnostics", "fallback_credit_token", "fallbacks"}
    | {"inference_geo", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id"}
)
"""Fields that tune Anthropic's service."""
_TRANSLATED = _REWRITTEN | _IGNORED | {"cache_control", "container", "mcp_servers"}
"""Fields that are not passed on under their own names."""
_ELSEWHERE: Mapping[str, str] = {
    "max_completion_tokens": "'max_tokens'",
    "n": "one request for each message",
    "response_format": "'output_config': {'format': …}",
    "stop": "'stop_sequences'",
}
_NOT_SERVED = ("container", "mcp_servers", "prefill")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.ABORTED: "max_tokens",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
