"""The items of a Responses request as messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from agl_core.apis.answered import NOT_KEPT, Message, ReplyCache
from agl_core.apis.dialect import joined_parts, unsupported, without_none, wrong
from agl_core.apis.reply import called, reasoning_of
from agl_core.types import Json
from agl_core.types.forms import parse_if_json

INPUT = "input"
"""Argument of the function that stands for a custom tool."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""By type of part: the field with its text."""
_ITEM_ID = re.compile(r"(msg|rs|fc)_([0-9a-f]{32}|[a-z]+-[0-9a-f-]{37}\.[0-9a-f]{16})_([0-9]+)")
"""An item's kind, reply, and number in it; replies of sessions contain the session's id."""


def full_name(named: Mapping[str, Any]) -> str:
    """The name that the model sees of a tool that may be in a namespace."""
    return "__".join(filter(None, (named.get("namespace"), named["name"])))


def custom_input(arguments: str) -> str:
    """The text that the model wrote for a custom tool: the argument `input`, or all of them if that is no text.

    >>> custom_input('{"input": "ls"}'), custom_input('{"cmd": "ls"}')
    ('ls', '{"cmd": "ls"}')
    """
    value = parse_if_json(arguments)
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def read_input(items: Any, answered: ReplyCache, ignored: set[str]) -> list[Message]:
    """The chat messages of `input`; items that say nothing to a model here are added to `ignored`.

    The items of one reply (reasoning, text, function calls) are one chat message, however they come back: without ids,
    or with each call's output behind it.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    reader = _Reader(answered, ignored)
    for item in items:
        reader.read(item)
    return reader.finish()


class _Reader:
    def __init__(self, answered: ReplyCache, ignored: set[str]) -> None:
        self._answered, self._ignored = answered, ignored
        self._messages: list[dict[str, Any]] = []
        self._reply: dict[str, Any] | None = None
        """The last assistant message, which may grow."""
        self._reply_id: str | None = None
        """The reply that it echoes, if its items name one."""

    def read(self, item: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        match kind:
            case "message":
                self._read_message(item)
            case "function_call" | "custom_tool_call":
                function = {"name": full_name(item), "arguments": self._arguments(item)}
                call = {"id": item["call_id"], "type": "function", "function": function}
                self._assistant("tool_calls", item).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item["output"])
                self._messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning" if item.get("content"):
                reasoning = "".join(part["text"] for part in item["content"])
                message = self._assistant("reasoning_content", item)
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case "reasoning":
                sealed = {**item, "id": item.get("encrypted_content")}  # Stateless clients leave ids out.
                if not (self._refer(item) or self._refer(sealed)):  # Another server's: unreadable here.
                    self._ignored.add("input.reasoning")
            case "item_reference":
                if not self._refer(item):
                    problem = f"refers to {item['id']!r}, which is not kept. {NOT_KEPT} Send the item itself"
                    raise wrong("input", problem, code="item_not_found")
            case _:  # Of OpenAI's own servers, or of a client for itself.
                self._ignored.add(f"input.{kind}")

    def _arguments(self, item: Mapping[str, Any]) -> Json:
        """A call's arguments: the model's own if a custom tool's input was read from them, as they may hold more."""
        if item["type"] == "function_call":
            return item["arguments"]
        exchange = self._answered.of_reply(self._answered.reply_of(item["call_id"]) or "")
        calls: Any = [call for own in exchange.messages for call in own.get("tool_calls") or ()] if exchange else ()
        own = "".join(called(call)[1] for call in calls if call["id"] == item["call_id"])
        return own if own and custom_input(own) == item["input"] else orjson.dumps({INPUT: item["input"]}).decode()

    def finish(self) -> list[Message]:
        return [self._finished(message) if message["role"] == "assistant" else message for message in self._messages]

    def _finished(self, message: dict[str, Any]) -> Message:
        content = message.get("content") or (None if message.get("tool_calls") else "")
        return self._answered.restore_echo({**message, "content": content})

    def _read_message(self, item: Mapping[str, Any]) -> None:
        role, content = item["role"], _content(item["content"])
        if role != "assistant":
            self._messages.append({"role": role, "content": content})
            return
        if not isinstance(content, str) and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        message = self._assistant("content", item)
        message["content"] = message["content"] + content if message.get("content") else content

    def _refer(self, item: Mapping[str, Any]) -> bool:
        """Take a part of a kept reply by its item's id; False if it is not kept."""
        matched = _matched_id(item)
        exchange = self._answered.of_reply(f"resp_{matched[2]}") if matched else None
        if matched is None or exchange is None:
            return False
        own = exchange.messages[0]
        number = int(matched[3])
        if matched[1] == "fc":
            calls: Any = own.get("tool_calls") or ()
            if number < len(calls):
                self._assistant("tool_calls", item).setdefault("tool_calls", []).append(calls[number])
            return number < len(calls)
        if number:  # The first item of a text refers to all of it.
            return True
        text = own.get("content") or own.get("refusal") or ""
        part, value = ("content", text) if matched[1] == "msg" else ("reasoning_content", reasoning_of(own))
        if value is not None:
            self._assistant(part, item)[part] = value
        return value is not None

    def _assistant(self, part: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant message that an item belongs to: the last one, or a new one."""
        matched, reply_id = _matched_id(item), self._reply_id_of(item)
        goes_on = matched is not None and int(matched[3]) > 0
        last = self._reply
        if last is not None and (part == "tool_calls" or goes_on or part not in last):
            if reply_id is not None and reply_id == self._reply_id:
                return last
            one_unknown = reply_id is None or self._reply_id is None
            in_order = part == "tool_calls" or (part == "content" and "tool_calls" not in last)
            if self._messages[-1] is last and one_unknown and in_order:
                self._reply_id = self._reply_id or reply_id
                return last
        self._reply, self._reply_id = {"role": "assistant"}, reply_id
        self._messages.append(self._reply)
        return self._reply

    def _reply_id_of(self, item: Mapping[str, Any]) -> str | None:
        if matched := _matched_id(item):
            return f"resp_{matched[2]}"
        call_id = item.get("call_id")
        return self._answered.reply_of(call_id) if isinstance(call_id, str) else None


def _matched_id(item: Mapping[str, Any]) -> re.Match[str] | None:
    own = item.get("id")
    return _ITEM_ID.fullmatch(own) if isinstance(own, str) else None


def _content(content: Any) -> Json:
    """A chat message's content: a text, or a list of parts."""
    return content if isinstance(content, str) else joined_parts([_part(part) for part in content])


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part[_TEXTS[kind]]}
    if kind == "input_image" and part.get("image_url") is not None:
        image = {"url": part["image_url"], "detail": part.get("detail")}
        return {"type": "image_url", "image_url": without_none(image)}
    raise unsupported("input", f"has a part of type {kind!r}: agl can pass on text, and images by 'image_url'")
