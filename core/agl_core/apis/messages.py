"""Anthropic's Messages API.

`system` becomes a system message, and each `tool_result` and text of a user message a message of its own, in order. The
model does not see `is_error`; it is recorded as the message's `status`, which decides the tool's. `stop_sequences`
becomes `stop`, `output_config` becomes `response_format` and `reasoning_effort`. Hints about caching are ignored, and
so is `thinking`, which is the chat template's affair here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import orjson

from agl_core.apis.answered import Message, ReplyCache
from agl_core.apis.dialect import Dialect, ModelRequest, Translation, joined_parts, unsupported, without_none, wrong
from agl_core.apis.errors import ApiError
from agl_core.apis.reply import Reply, Usage, called
from agl_core.apis.streams import Block, BlockRenderer, Event
from agl_core.types import FinishReason, Json
from agl_core.types.forms import parse_if_json

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_UNPARSED = "INVALID_JSON"
"""Key for arguments that are no JSON object, by Anthropic's documentation."""
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_STRING = {"type": "string"}
_FILE_FIELDS = {
    "path": _STRING,
    "view_range": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": {"type": "integer", "minimum": 0},
    "insert_text": _STRING,
}
_OUTPUT = frozenset({"text", "thinking", "tool_use"})
"""Blocks of a reply that are the model's own words."""
_CLIENT_TOOL = re.compile(r"(bash|text_editor|memory)_\d{8}")


def _of_files(*more: str, required: list[str], **fields: Any) -> dict[str, Any]:
    """The schema of a tool with commands on files."""
    commands = {"type": "string", "enum": ["view", "create", "str_replace", "insert", *more]}
    return {"type": "object", "properties": {"command": commands, **_FILE_FIELDS, **fields}, "required": required}


_CLIENT_TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open between calls; `restart` opens a new one.",
        {"type": "object", "properties": {"command": _STRING, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "Works on text files: `view` a file or folder, `create` a file with `file_text`, `str_replace` the one place "
        "that is `old_str` by `new_str`, or `insert` `insert_text` after the line `insert_line`.",
        _of_files(required=["command", "path"]),
    ),
    "memory": (
        "Keeps notes in files below /memories, which stay for later conversations: `view` a file or folder, `create` "
        "a file with `file_text`, `str_replace` the one place that is `old_str` by `new_str`, `insert` `insert_text` "
        "after the line `insert_line`, `delete` a `path`, or `rename` `old_path` to `new_path`.",
        _of_files("delete", "rename", required=["command"], old_path=_STRING, new_path=_STRING),
    ),
}
"""By the beginning of their type: description and schema of tools that Anthropic defines and the agent runs."""


class Messages(Dialect):
    """`POST /v1/messages`, and `/v1/messages/count_tokens`, which `counts`. Anthropic's client adds `/v1` itself."""

    id_prefix = "msg_"
    refused = frozenset(
        {"max_completion_tokens", "n", "response_format", "stop", "container", "mcp_servers", "prefill"}
        | {"return_token_ids", "prompt_logprobs"}
    )
    rewritten = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "output_config"})
    ignored = frozenset(
        {"billing_policy", "compaction", "context_management", "diagnostics", "fallback_credit_token", "fallbacks"}
        | {"inference_geo", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id"}
    )
    kept = frozenset({"cache_control", "thread"})

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.api = "messages/count_tokens" if counts else "messages"

    def translate(self, body: Mapping[str, Any], answered: ReplyCache, ignored: set[str]) -> Translation:
        if body.get("thread"):
            # Anthropic's tool runner asks for one, and sends whole conversations after this very code.
            raise wrong("thread", "is not served: send the whole conversation", code="thread_unsupported_request")
        limit = 1 if self.counts else body["max_tokens"]
        system = body.get("system")
        messages: list[Message] = []
        if system:
            parts = system if isinstance(system, str) else joined_parts(_parts(system, set()))
            messages.append({"role": "system", "content": parts})
        for message in body["messages"]:
            messages += _read_message(message["role"], message["content"], answered, ignored)
        if messages and messages[-1]["role"] == "assistant":
            raise unsupported(
                "messages",
                "ends with the assistant's: agl does not continue a reply that was begun (prefill), since those tokens "
                "would not be the model's",
            )
        tools = [function for tool in body.get("tools") or () if (function := _read_tool(tool, ignored))]
        choice, output = body.get("tool_choice") or {}, body.get("output_config") or {}
        ignored.update(f"output_config.{name}" for name in output if name not in ("format", "effort"))
        chat: dict[str, Json] = {
            # Chat completions do not know the `status` of a tool's result.
            "messages": [{k: v for k, v in m.items() if k != "status"} if m["role"] == "tool" else m for m in messages],
            "tools": tools or None,
            "tool_choice": None if f"tools.{choice.get('name')}" in ignored else _tool_choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "stop": body.get("stop_sequences") or None,
            "response_format": _response_format(output.get("format")),
            "reasoning_effort": output.get("effort"),
        }
        return Translation(chat, limit, recorded={"messages": messages})

    def chunk(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        delta: Mapping[str, Any] = {}
        ended = event
        match event["type"]:
            case "message":
                blocks = [block for block in event["content"] if block["type"] in _OUTPUT]
                delta = _read_reply(blocks, ReplyCache(), set())
            case "content_block_start" if (block := event["content_block"])["type"] == "tool_use":
                call = {"index": event["index"], "id": block["id"], "function": {"name": block["name"]}}
                delta = {"tool_calls": [call]}
            case "content_block_delta":
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        delta = {"content": text}
                    case {"type": "thinking_delta", "thinking": text}:
                        delta = {"reasoning_content": text}
                    case {"type": "input_json_delta", "partial_json": text}:
                        delta = {"tool_calls": [{"index": event["index"], "function": {"arguments": text}}]}
            case "message_delta":
                ended = event["delta"]
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": ended.get("stop_reason")}]}

    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        if self.counts:
            return {"input_tokens": reply.usage.prompt}
        renderer = self.renderer(request, reply.id)
        list(renderer.events(reply))  # Collects the blocks.
        content = [_block(block) for block in renderer.blocks]
        return {**_message(request, reply.id, reply.usage), "content": content, **_ended(reply)}

    def renderer(self, request: ModelRequest, reply_id: str) -> _Events:
        return _Events(request, reply_id)

    def problem(self, error: ApiError) -> Mapping[str, Json]:
        return _problem(error)


def _problem(error: ApiError) -> dict[str, Json]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    # Clients recognise this beginning.
    message = f"prompt is too long: {error.message}" if error.is_context_overflow else error.message
    problem: dict[str, Json] = {"type": _ERRORS.get(error.status, default), "message": message}
    if error.code is not None:
        problem["details"] = {"error_code": error.code}
    return {"type": "error", "error": problem}


def _tool_choice(choice: Mapping[str, Any]) -> Json:
    if not choice:
        return None
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return _CHOICES[choice["type"]]


def _response_format(wanted: Mapping[str, Any] | None) -> Json:
    if wanted is None:
        return None
    if wanted["type"] != "json_schema":
        raise unsupported("output_config.format.type", "must be 'json_schema'")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"], "strict": True}}


def _message(request: ModelRequest, reply_id: str, usage: Usage) -> dict[str, Json]:
    """The message of `message_start`."""
    return {
        "id": reply_id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, Json]:
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _ended(reply: Reply) -> dict[str, Json]:
    choice = reply.choices[0]
    ended = "refusal" if choice.message.get("refusal") else "stop_sequence" if reply.stop_sequence else "end_turn"
    filtered = choice.finish_reason is FinishReason.CONTENT_FILTER
    reason = "refusal" if filtered else "tool_use" if choice.message.get("tool_calls") else ended
    reason = "max_tokens" if choice.finish_reason.is_cut else reason
    return {"stop_reason": reason, "stop_sequence": reply.stop_sequence if reason == "stop_sequence" else None}


def _block(block: Block) -> dict[str, Json]:
    if block.kind == "tool_call":
        name, _ = called(block.call)
        return {"type": "tool_use", "id": block.call["id"], "name": name, "input": _tool_input(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return _text(block.text)


class _Events(BlockRenderer):
    """From `message_start` to `message_stop`. A tool's input goes out whole, as it has to be an object."""

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        super().__init__()
        self._request, self._reply_id = request, reply_id

    def start(self, head: Mapping[str, Any]) -> Iterable[Event]:
        usage = msgspec.structs.replace(Usage.read(head.get("usage"), head.get("prompt_token_ids"), 0), completion=0)
        message = _message(self._request, self._reply_id, usage)
        return {"type": "message_start", "message": message}, {"type": "ping"}

    def opened(self, index: int, block: Block) -> Iterator[Event]:
        begun = _block(block)
        if block.kind == "tool_call":
            begun["input"] = {}
        yield {"type": "content_block_start", "index": index, "content_block": begun}

    def extended(self, index: int, block: Block, text: str, logprobs: object) -> Iterator[Event]:
        if text and block.kind != "tool_call":
            kind = "thinking" if block.kind == "reasoning" else "text"
            yield self._delta(index, {"type": f"{kind}_delta", kind: text})

    def closed(self, index: int, block: Block) -> Iterator[Event]:
        if block.kind == "tool_call":
            text = orjson.dumps(_tool_input(block.text)).decode()
            yield self._delta(index, {"type": "input_json_delta", "partial_json": text})
        elif block.kind == "reasoning":  # The AI SDK sends no thinking back without a signature.
            yield self._delta(index, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": index}

    def _delta(self, index: int, delta: Mapping[str, Json]) -> Event:
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def finish(self, reply: Reply) -> Iterable[Event]:
        yield from self.end()
        yield {"type": "message_delta", "delta": _ended(reply), "usage": _usage(reply.usage)}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Event:
        return _problem(error)


def _read_message(role: str, content: Any, answered: ReplyCache, ignored: set[str]) -> list[Message]:
    """The chat messages of one message; a tool's has a `status` if the agent gives `is_error`."""
    blocks = [_text(content)] if isinstance(content, str) else content
    if role == "assistant":
        return [_read_reply(blocks, answered, ignored)]
    if role not in ("user", "system"):
        raise wrong("messages.role", "must be 'user', 'assistant' or 'system'")
    messages: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "tool_result":
            parts += _parts([block], ignored)
            continue
        if parts:
            messages.append({"role": role, "content": joined_parts(parts)})
            parts = []
        messages.append(_tool_result(block, ignored))
    if parts or not blocks:
        messages.append({"role": role, "content": joined_parts(parts)})
    return messages


def _tool_result(block: Mapping[str, Any], ignored: set[str]) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = joined_parts(_parts(content, ignored))
    message = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    failed = block.get("is_error")
    return message if failed is None else {**message, "status": "error" if failed else "success"}


def _read_reply(blocks: list[dict[str, Any]], answered: ReplyCache, ignored: set[str]) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                reasoning.append(block["thinking"])
            case "tool_use":
                function = {"name": block["name"], "arguments": _arguments(block["input"])}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "redacted_thinking":  # Encrypted by another server: unreadable here.
                ignored.add("redacted_thinking")
            case kind:
                raise unsupported("messages", f"has a block of type {kind!r}, which agl cannot pass on")
    message: dict[str, Json] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return answered.restore_echo(message)


def _arguments(written: Mapping[str, Any]) -> str:
    """A tool's input as the text of chat completions."""
    unparsed = written.get(_UNPARSED) if len(written) == 1 else None
    return unparsed if isinstance(unparsed, str) else json.dumps(written, ensure_ascii=False)


def _tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as this API's object.

    >>> _tool_input('{"city": "Bern"}'), _tool_input('{"city')
    ({'city': 'Bern'}, {'INVALID_JSON': '{"city'})
    """
    value = parse_if_json(arguments)
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def _read_tool(tool: Mapping[str, Any], ignored: set[str]) -> dict[str, Json] | None:
    """One entry of `tools`, with its schema if hosted models know it by its type; None if Anthropic would run it."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        matched = _CLIENT_TOOL.fullmatch(kind)
        if matched is None:
            ignored.add(f"tools.{tool.get('name') or kind}")
            return None
        description, schema = _CLIENT_TOOLS[matched[1]]
        tool = {**tool, "description": description, "input_schema": schema}
    ignored.update(f"tools.{name}" for name, value in tool.items() if value is not None and name not in _TOOL_FIELDS)
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": without_none(function)}


def _parts(blocks: list[dict[str, Any]], ignored: set[str]) -> list[dict[str, Any]]:
    """Blocks of a user's message, tool result or system prompt as parts of a chat message."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        source: Any = block.get("source")
        if block.get("citations"):
            ignored.add("citations")
        match block["type"], source.get("type") if isinstance(source, dict) else None:
            case "text", _:
                parts.append(_text(block["text"]))
            case "tool_reference", _:  # The tool is among the request's tools.
                parts.append(_text(block["tool_name"]))
            case "search_result", _:
                parts += [*_texts(block, "title", "source"), *_parts(block["content"], ignored)]
            case "image", "url":
                parts.append({"type": "image_url", "image_url": {"url": source["url"]}})
            case "image", "base64":
                parts.append({"type": "image_url", "image_url": {"url": _data_url(source)}})
            case "document", "text":
                parts += [*_texts(block, "title", "context"), _text(source["data"])]
            case "document", "content":
                content = source["content"]
                inside = [_text(content)] if isinstance(content, str) else content
                parts += [*_texts(block, "title", "context"), *_parts(inside, ignored)]
            case "document", "base64":
                file = {"filename": block.get("title") or "document.pdf", "file_data": _data_url(source)}
                parts += [*_texts(block, "context"), {"type": "file", "file": file}]
            case kind, _:
                raise unsupported("messages", f"has a block of type {kind!r}, which agl cannot pass on")
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _texts(block: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    return [_text(block[name]) for name in names if block.get(name) is not None]


def _data_url(source: Mapping[str, Any]) -> str:
    return f"data:{source['media_type']};base64,{source['data']}"
