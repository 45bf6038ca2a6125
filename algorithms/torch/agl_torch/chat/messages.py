"""Messages as templates want them, and as they are compared; and what is wrong with a request.

A client may write one message in many ways: content as None, a string or a list of parts; tool arguments as any JSON
text of the same value; keys that are null. Templates want one way, and an echoed reply must be recognised in all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl_core.errors import ServerError


class ChatError(ServerError):
    """A request that cannot be answered; becomes an OpenAI-shaped error reply.

    `param` names the field of the request, `code` is for programs to tell errors apart.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for `apply_chat_template`: text content, tool arguments as values, no null keys.

    Raises ChatError for what is no message or no text.
    """
    if not messages:
        raise ChatError("messages is empty: send at least one message.", param="messages")
    names: dict[str, str] = {}
    return [_normalise(message, f"messages[{index}]", names) for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, Any], place: str, names: dict[str, str]) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise ChatError(f"{place}.role is {role!r}; it must be one of {', '.join(_ROLES)}.", param=f"{place}.role")
    said = _texts(message, place)
    normal: Message = {"role": "system" if role == "developer" else role, "content": said["text"]}
    if message.get("name") is not None:
        normal["name"] = message["name"]
    # Servers and clients name it differently; this is the name that chat templates know.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or said["thinking"]
    if reasoning:
        normal["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        normal["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])
        ]
        names.update((call["id"], call["function"]["name"]) for call in normal["tool_calls"] if "id" in call)
    if message.get("tool_call_id") is not None:
        normal["tool_call_id"] = message["tool_call_id"]
        # Some templates show a tool's name, which the OpenAI API does not repeat on its result.
        if message["tool_call_id"] in names:
            normal.setdefault("name", names[message["tool_call_id"]])
    return normal


def _texts(message: Mapping[str, Any], place: str) -> dict[str, str]:
    """What a message says, and what it thought if its content has that too."""
    content, said = message.get("content"), {"text": "", "thinking": ""}
    if content is None or isinstance(content, str):
        return {**said, "text": content or ""}
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "thinking", "refusal") else None
        if kind == "thinking" and isinstance(text, list):
            text = _texts({"content": text}, f"{place}.content[{index}].thinking")["text"]
        if not isinstance(text, str):
            raise ChatError(
                f"{place}.content[{index}] is of type {kind!r}; this engine takes text only.",
                param=f"{place}.content",
                code="unsupported_content",
            )
        said["thinking" if kind == "thinking" else "text"] += text
    return said


def _tool_call(call: Any, place: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{place} is no function call: it needs function.name and function.arguments.", param=place)
    normal: Message = {
        "type": "function",
        "function": {"name": function["name"], "arguments": parsed_arguments(function.get("arguments"))},
    }
    if isinstance(call.get("id"), str):
        normal["id"] = call["id"]
    return normal


def parsed_arguments(arguments: Any) -> Any:
    """Tool arguments as a value; a text that is no JSON stays as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def meaning(message: Message) -> str:
    """What a normalised message says, whatever its spacing and call ids: equal for a reply and its echo."""
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True, ensure_ascii=False)


def call_ids(message: Message) -> tuple[str | None, ...]:
    return tuple(call.get("id") for call in message.get("tool_calls", ()))


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Entry k identifies what the first k messages mean, k = 0 … len(messages)."""
    state = hashlib.blake2b(digest_size=16)
    found = [state.digest()]
    for message in messages:
        state.update(meaning(message).encode() + b"\0")
        found.append(state.digest())
    return found
