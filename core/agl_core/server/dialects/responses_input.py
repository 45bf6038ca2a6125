"""From the input items of the Responses API to chat messages.

The items of one reply (reasoning, text, function calls) are one chat message, however they come back: without ids,
or with each call's output behind the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agl_core.server.answered import NOT_KEPT, Answered, Message
from agl_core.server.dialects import fields
from agl_core.server.reply import reasoning_of
from agl_core.types import Json

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Where the parts that are text have it."""
_ITEM_ID = re.compile(r"(msg|rs|fc|ctc)_([0-9a-f]{32}|[a-z]+-[0-9a-f-]{37}\.[0-9a-f]{16})(?:_([0-9]+))?")
"""Kind, reply and number of an item; a reply of a session is named after it."""


def item_id(kind: str, reply_id: str, number: int | None = None) -> str:
    """The id of an output item, which names the reply that it is part of.

    >>> item_id("fc", "resp_00", 1)
    'fc_00_1'
    """
    _, _, unique = reply_id.rpartition("_")
    return f"{kind}_{unique}" if number is None else f"{kind}_{unique}_{number}"


def read_input(items: Json, answered: Answered, ignored: set[str]) -> list[Message]:
    """The chat messages that `input` stands for; ApiError 400 names the item that cannot be translated.

    What is left out is added to `ignored`.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    reader = _Reader(answered, ignored)
    for path, item in fields.objects(items, "input"):
        reader.read(path, item)
    return reader.finish()


class _Reader:
    """Puts items together, in order."""

    def __init__(self, answered: Answered, ignored: set[str]) -> None:
        self._answered, self._ignored = answered, ignored
        self._messages: list[dict[str, Any]] = []
        self._reply: dict[str, Any] | None = None
        """The last assistant message; it may still grow."""
        self._reply_id: str | None = None
        """The reply that it echoes, if its items name one."""

    def read(self, path: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._read_message(path, item)
            case "function_call":
                self._read_call(path, item, "function", "arguments")
            case "custom_tool_call":
                self._read_call(path, item, "custom", "input")
            case "function_call_output" | "custom_tool_call_output":
                call_id = fields.need_text(item, "call_id", f"{path}.")
                content = _content(fields.need(item, "output", f"{path}."), f"{path}.output")
                self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "reasoning" if item.get("content"):
                parts = fields.objects(item["content"], f"{path}.content")
                reasoning = "".join(fields.need_text(part, "text", f"{own_path}.") for own_path, part in parts)
                self._assistant("reasoning_content", item)["reasoning_content"] = reasoning
            case "reasoning":
                sealed = {**item, "id": item.get("encrypted_content")}  # Clients that keep nothing leave ids out.
                if not (self._refer(item) or self._refer(sealed)):  # No model here can read another server's.
                    self._ignored.add("input.reasoning")
            case "item_reference":
                fields.need_text(item, "id", f"{path}.")
                if not self._refer(item):
                    raise fields.wrong(
                        path,
                        f"refers to {fields.shown(item['id'])}, which is not kept. {NOT_KEPT} Send the item itself",
                        code="item_not_found",
                    )
            case _:
                raise fields.unsupported(
                    f"{path}.type",
                    f"is {fields.shown(kind)}: agl can pass on items of type message, function_call, "
                    "function_call_output, custom_tool_call, custom_tool_call_output, reasoning and item_reference",
                )

    def finish(self) -> list[Message]:
        return [self._finished(message) if message["role"] == "assistant" else message for message in self._messages]

    def _finished(self, message: dict[str, Any]) -> Message:
        content = message.get("content") or (None if message.get("tool_calls") else "")
        return self._answered.own({**message, "content": content})

    def _read_message(self, path: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise fields.wrong(f"{path}.role", f"must be one of {', '.join(_ROLES)}, not {fields.shown(role)}")
        content = _content(fields.need(item, "content", f"{path}."), f"{path}.content")
        if role != "assistant":
            self._messages.append({"role": role, "content": content})
        else:
            if not isinstance(content, str) and all(part["type"] == "text" for part in content):
                content = "".join(part["text"] for part in content)
            self._assistant("content", item)["content"] = content

    def _read_call(self, path: str, item: Mapping[str, Any], kind: str, written: str) -> None:
        tool = {name: fields.need_text(item, name, f"{path}.") for name in ("name", written)}
        call = {"id": fields.need_text(item, "call_id", f"{path}."), "type": kind, kind: tool}
        self._assistant("tool_calls", item).setdefault("tool_calls", []).append(call)

    def _refer(self, item: Mapping[str, Any]) -> bool:
        """Take a part of a kept reply, by its item's id alone; False if it is not kept."""
        matched = _ITEM_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        own = self._answered.message(f"resp_{matched[2]}") if matched else None
        if matched is None or own is None:
            return False
        if matched[1] in ("fc", "ctc"):
            calls: Any = own.get("tool_calls") or ()
            called = calls[int(matched[3]) : int(matched[3]) + 1] if matched[3] else ()
            if called:
                self._assistant("tool_calls", item).setdefault("tool_calls", []).extend(called)
            return bool(called)
        part, value = {
            "msg": ("content", own.get("content")),
            "rs": ("reasoning_content", reasoning_of(own)),
        }[matched[1]]
        if value is not None:
            self._assistant(part, item)[part] = value
        return value is not None

    def _assistant(self, part: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant message that an item is part of: the last one, or a new one."""
        reply_id = self._reply_id_of(item)
        last = self._reply
        if last is not None and (part == "tool_calls" or part not in last):
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
        own = item.get("id")
        matched = _ITEM_ID.fullmatch(own) if isinstance(own, str) else None
        if matched:
            return f"resp_{matched[2]}"
        call_id = item.get("call_id")
        return self._answered.reply_of(call_id) if isinstance(call_id, str) else None


def _content(content: Json, path: str) -> Json:
    """A text, or a list of parts as chat completions have them; one part that is text becomes a text."""
    if isinstance(content, str):
        return content
    fields.must(isinstance(content, list), path, "a string or a list of parts", content)
    parts = [_part(own_path, part) for own_path, part in fields.objects(content, path)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(path: str, part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return {"type": "text", "text": fields.need_text(part, _TEXTS[kind], f"{path}.")}
    if kind == "input_image" and part.get("image_url") is not None:
        image = {"url": fields.need_text(part, "image_url", f"{path}."), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": {name: value for name, value in image.items() if value is not None}}
    raise fields.unsupported(
        path, f"is a part of type {fields.shown(kind)}: agl can pass on text, and images by 'image_url'"
    )
