"""From the messages of Anthropic's Messages API to those of a chat, and tools to and fro.

A user message can hold the results of several tools and a text: each becomes a message of its own, in order. Readers
add what they leave out to `ignored`, by the names of the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import orjson

from agl_core.server.dialects import fields
from agl_core.server.dialects.replies import Message, ReplyMemory
from agl_core.types import Json

_Blocks: TypeAlias = list[tuple[str, dict[str, Any]]]
"""Blocks of a message's content, each with its place."""

_UNPARSED = "INVALID_JSON"
"""The key under which the text of arguments that are no JSON object stands, as Anthropic's documentation has it."""
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_STRING, _LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
_FILE_FIELDS = {
    "path": _STRING,
    "view_range": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "file_text": _STRING,
    "old_str": _STRING,
    "new_str": _STRING,
    "insert_line": _LINE,
    "insert_text": _STRING,
}
_CLIENT_TOOL = re.compile(r"(bash|text_editor|memory)_\d{8}")


def _of_files(*more: str, required: list[str], **fields: Any) -> dict[str, Any]:
    """The schema of a tool that does one of several things with files."""
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
"""The tools that Anthropic defines and the agent runs, by the beginning of their type."""


def read_system(system: Json) -> list[Message]:
    """The system message, if there is one."""
    if system is None:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    blocks = fields.each_object(system, "system")
    return [{"role": "system", "content": _content(_parts(blocks, set()))}] if blocks else []


def read_messages(messages: Json, memory: ReplyMemory, ignored: set[str]) -> list[Message]:
    """The chat messages; ApiError 400 names the block that cannot be translated.

    The result of a tool has a `status` where the agent says whether it `is_error`.
    """
    placed = fields.each_object(messages, "messages")
    if not placed:
        raise fields.wrong("messages", "must be a list with at least one message", code="missing_required_parameter")
    found: list[Message] = []
    for place, message in placed:
        role, content = message.get("role"), fields.need(message, "content", f"{place}.")
        if role not in ("user", "assistant", "system"):
            raise fields.wrong(f"{place}.role", f"must be 'user', 'assistant' or 'system', not {fields.shown(role)}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = fields.each_object(content, f"{place}.content")
        found += [_read_reply(blocks, memory, ignored)] if role == "assistant" else _read_input(role, blocks, ignored)
    if found and found[-1]["role"] == "assistant":
        raise fields.unsupported(
            placed[-1][0],
            "is the assistant's: agl does not continue a reply that was begun (prefill), since those tokens would not "
            "be the model's. End with a user message",
        )
    return found


def unmarked(messages: list[Message]) -> list[Message]:
    """The messages as chat completions know them: without the `status` of tools' results."""
    return [{k: v for k, v in m.items() if k != "status"} if m["role"] == "tool" else m for m in messages]


def read_tool(place: str, tool: Mapping[str, Any], ignored: set[str]) -> dict[str, Json]:
    """One entry of `tools`; a tool that Anthropic runs is refused.

    A tool that Anthropic defines and the agent runs gets a schema here: hosted models know it by its type alone.
    """
    kind = tool.get("type")
    if kind not in (None, "custom"):
        matched = _CLIENT_TOOL.fullmatch(kind) if isinstance(kind, str) else None
        if matched is None:
            raise fields.unsupported(
                f"{place}.type",
                f"is {fields.shown(kind)}: agl can pass on the agent's own tools, and of Anthropic's bash, text editor "
                "and memory",
            )
        description, schema = _CLIENT_TOOLS[matched[1]]
        tool = {**tool, "description": description, "input_schema": schema}
    schema = fields.need(tool, "input_schema", f"{place}.")
    fields.must(isinstance(schema, dict), f"{place}.input_schema", "an object", schema)
    fields.check_fields(tool, fields.FUNCTION, f"{place}.")
    ignored.update(f"tools.{name}" for name, value in tool.items() if value is not None and name not in _TOOL_FIELDS)
    function = {"name": fields.need_text(tool, "name", f"{place}."), "description": tool.get("description")}
    function |= {"parameters": schema, "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as this API has them, an object.

    >>> tool_input('{"city": "Bern"}'), tool_input('{"city')
    ({'city': 'Bern'}, {'INVALID_JSON': '{"city'})
    """
    try:
        value = fields.loads(arguments)
        orjson.dumps(value)  # it may be nested too deeply to be written
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {_UNPARSED: arguments}
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def _read_input(role: str, blocks: _Blocks, ignored: set[str]) -> Iterator[Message]:
    """A message of the user or the system."""
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        if block.get("type") != "tool_result":
            parts += _parts([(place, block)], ignored)
            continue
        if parts:
            yield {"role": role, "content": _content(parts)}
            parts = []
        yield _tool_result(place, block, ignored)
    if parts or not blocks:
        yield {"role": role, "content": _content(parts)}


def _tool_result(place: str, block: Mapping[str, Any], ignored: set[str]) -> Message:
    call_id, content = fields.need_text(block, "tool_use_id", f"{place}."), block.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = _content(_parts(fields.each_object(content, f"{place}.content"), ignored))
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    failed = block.get("is_error")
    if failed is None:
        return message
    fields.must(isinstance(failed, bool), f"{place}.is_error", "true or false", failed)
    return {**message, "status": "error" if failed else "success"}


def _read_reply(blocks: _Blocks, memory: ReplyMemory, ignored: set[str]) -> Message:
    texts, reasoning, calls = [], [], []
    for place, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(fields.need_text(block, "text", f"{place}."))
            case "thinking":
                reasoning.append(fields.need_text(block, "thinking", f"{place}."))
            case "tool_use":
                calls.append(_tool_use(place, block))
            case "redacted_thinking":  # Another server's, and encrypted: no model here can read it.
                ignored.add("redacted_thinking")
            case kind:
                raise fields.unsupported(
                    f"{place}.type",
                    f"is {fields.shown(kind)}: agl can pass on text, thinking and tool_use of an assistant",
                )
    message: dict[str, Json] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return memory.own(message)


def _tool_use(place: str, block: Mapping[str, Any]) -> dict[str, Json]:
    arguments = fields.need(block, "input", f"{place}.")
    fields.must(isinstance(arguments, dict), f"{place}.input", "an object", arguments)
    unparsed = arguments.get(_UNPARSED) if len(arguments) == 1 else None
    text = unparsed if isinstance(unparsed, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": fields.need_text(block, "name", f"{place}."), "arguments": text}
    return {"id": fields.need_text(block, "id", f"{place}."), "type": "function", "function": function}


def _parts(blocks: _Blocks, ignored: set[str]) -> list[dict[str, Any]]:
    """Blocks of a user's message, of a tool's result or of the system prompt as parts of a chat message."""
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        source: Any = block.get("source")
        origin = source.get("type") if isinstance(source, dict) else None
        if block.get("citations"):
            ignored.add("citations")
        match block.get("type"), origin:
            case "text", _:
                parts.append(_text(fields.need_text(block, "text", f"{place}.")))
            case "tool_reference", _:  # The tool is among the request's tools.
                parts.append(_text(fields.need_text(block, "tool_name", f"{place}.")))
            case "search_result", _:
                content = fields.each_object(block.get("content"), f"{place}.content")
                parts += [*_texts(place, block, "title", "source"), *_parts(content, ignored)]
            case "image", "url":
                url = fields.need_text(source, "url", f"{place}.source.")
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case "image", "base64":
                parts.append({"type": "image_url", "image_url": {"url": _data_url(place, source)}})
            case "document", "text":
                data = fields.need_text(source, "data", f"{place}.source.")
                parts += [*_texts(place, block, "title", "context"), _text(data)]
            case "document", "content":
                content = fields.need(source, "content", f"{place}.source.")
                placed = fields.each_object(
                    [_text(content)] if isinstance(content, str) else content, f"{place}.source.content"
                )
                parts += [*_texts(place, block, "title", "context"), *_parts(placed, ignored)]
            case "document", "base64":
                file = {"filename": block.get("title") or "document.pdf", "file_data": _data_url(place, source)}
                parts += [*_texts(place, block, "context"), {"type": "file", "file": file}]
            case kind, _:
                raise fields.unsupported(
                    f"{place}.type",
                    f"is {fields.shown(kind)}: agl can pass on text, images (base64 or url), documents (text, content "
                    "or base64), and results of searches and of the agent's own tools",
                )
    return parts


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _texts(place: str, block: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """What a block says about its content."""
    return [_text(fields.need_text(block, name, f"{place}.")) for name in names if block.get(name) is not None]


def _data_url(place: str, source: Mapping[str, Any]) -> str:
    kind, data = (fields.need_text(source, name, f"{place}.source.") for name in ("media_type", "data"))
    return f"data:{kind};base64,{data}"


def _content(parts: list[dict[str, Any]]) -> Json:
    """Parts as a chat message has them; one that is text, or none, becomes a text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
