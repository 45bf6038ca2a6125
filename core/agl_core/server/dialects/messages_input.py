"""From the messages of Anthropic's Messages API to those of a chat, and tools to and fro.

A user message can hold the results of several tools and a text: each becomes a message of its own, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from agl_core.server.dialects import fields
from agl_core.server.dialects.replies import Message, ReplyMemory
from agl_core.types import Json

_UNPARSED = "INVALID_JSON"
"""The key under which the text of arguments that are no JSON object stands, as Anthropic's documentation has it."""


def read_system(system: Json) -> list[Message]:
    """The system message, if there is one."""
    if system is None:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    blocks = [_part(place, block) for place, block in fields.each_object(system, "system")]
    return [{"role": "system", "content": _content(blocks)}] if blocks else []


def read_messages(messages: Json, memory: ReplyMemory) -> list[Message]:
    """The chat messages; ApiError 400 names the block that cannot be translated.

    The result of a tool has a `status` where the agent says whether it `is_error`.
    """
    placed = fields.each_object(messages, "messages")
    if not placed:
        raise fields.wrong("messages", "must be a list with at least one message", code="missing_required_parameter")
    found: list[Message] = []
    for place, message in placed:
        role, content = message.get("role"), fields.need(message, "content", f"{place}.")
        if role not in ("user", "assistant"):
            raise fields.wrong(
                f"{place}.role", f"must be 'user' or 'assistant', not {fields.shown(role)}; use 'system' for a prompt"
            )
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = fields.each_object(content, f"{place}.content")
        found += [_read_reply(blocks, memory)] if role == "assistant" else _read_user(blocks)
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


def read_tool(place: str, tool: Mapping[str, Any]) -> dict[str, Json]:
    """One entry of `tools`; a tool that Anthropic defines or runs is refused."""
    if tool.get("type") not in (None, "custom"):
        raise fields.unsupported(
            f"{place}.type", f"is {fields.shown(tool['type'])}: agl can pass on the agent's own tools only"
        )
    schema = fields.need(tool, "input_schema", f"{place}.")
    fields.must(isinstance(schema, dict), f"{place}.input_schema", "an object", schema)
    fields.check_fields(tool, fields.FUNCTION, f"{place}.")
    function = {"name": fields.need_text(tool, "name", f"{place}."), "description": tool.get("description")}
    function |= {"parameters": schema, "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as this API has them, an object.

    >>> tool_input('{"city": "Bern"}'), tool_input('{"city')
    ({'city': 'Bern'}, {'INVALID_JSON': '{"city'})
    """
    try:
        value = orjson.loads(arguments)
        orjson.dumps(value)  # it may be nested too deeply to be written
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {_UNPARSED: arguments}
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def _read_user(blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(place, block))
            continue
        if parts:
            yield {"role": "user", "content": _content(parts)}
            parts = []
        yield _tool_result(place, block)
    if parts or not blocks:
        yield {"role": "user", "content": _content(parts)}


def _tool_result(place: str, block: Mapping[str, Any]) -> Message:
    call_id, content = fields.need_text(block, "tool_use_id", f"{place}."), block.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = _content([_part(*each) for each in fields.each_object(content, f"{place}.content")])
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    failed = block.get("is_error")
    if failed is None:
        return message
    fields.must(isinstance(failed, bool), f"{place}.is_error", "true or false", failed)
    return {**message, "status": "error" if failed else "success"}


def _read_reply(blocks: list[tuple[str, dict[str, Any]]], memory: ReplyMemory) -> Message:
    texts, reasoning, calls = [], [], []
    for place, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(fields.need_text(block, "text", f"{place}."))
            case "thinking":
                reasoning.append(fields.need_text(block, "thinking", f"{place}."))
            case "tool_use":
                calls.append(_tool_use(place, block))
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


def _part(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a user's message, of a tool's result or of the system prompt as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": fields.need_text(block, "text", f"{place}.")}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict) and source.get("type") in ("base64", "url"):
        where = f"{place}.source."
        if source["type"] == "url":
            url = fields.need_text(source, "url", where)
        else:
            url = (
                f"data:{fields.need_text(source, 'media_type', where)};base64,{fields.need_text(source, 'data', where)}"
            )
        return {"type": "image_url", "image_url": {"url": url}}
    raise fields.unsupported(
        f"{place}.type",
        f"is {fields.shown(kind)}: agl can pass on text, images (base64 or url) and results of the agent's own tools",
    )


def _content(parts: list[dict[str, Any]]) -> Json:
    """Parts as a chat message has them; one that is text, or none, becomes a text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
