"""OpenAI's Responses API.

Instructions become a system message before the input; `text.format` becomes `response_format`, `reasoning.effort`
becomes `reasoning_effort`. Tools that are no functions go to the model server as they are, which may refuse them. What
would need OpenAI's own servers (stored prompts and conversations, background) is refused. Nothing here summarises
reasoning, or shortens a conversation that is too long, so what asks for that is ignored.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agl_core.apis.answered import NOT_KEPT, Answered, Message
from agl_core.apis.dialect import Dialect, ModelRequest, Translation, joined_parts, unsupported, without_none, wrong
from agl_core.apis.errors import ApiError
from agl_core.apis.reply import Reply, called, reasoning_of
from agl_core.apis.streams import Block, BlockRenderer, Event, Renderer
from agl_core.types import FinishReason, Json

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_WRITTEN: Mapping[str, tuple[str, str]] = {
    "reasoning": ("text", "reasoning_text"),
    "content": ("text", "output_text"),
    "refusal": ("refusal", "refusal"),
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""By kind of block or type of tool call: the field with what the model wrote, and what its events are called."""
_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORTED: "max_output_tokens",
}
_PREFIXES = {"reasoning": "rs", "content": "msg", "refusal": "msg", "tool_call": "fc"}
"""Of the ids of items."""
_OUTPUT = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
"""The items of a reply that are the model's own words."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Where the parts that are text have it."""
_ITEM_ID = re.compile(r"(msg|rs|fc)_([0-9a-f]{32}|[a-z]+-[0-9a-f-]{37}\.[0-9a-f]{16})_([0-9]+)")
"""Kind of an item, its reply, and its number among those; a reply of a session is named after it."""


class Responses(Dialect):
    """`POST /v1/responses`, and `/v1/responses/input_tokens`, which `counts`."""

    id_prefix = "resp_"
    refused = frozenset(
        {"messages", "max_tokens", "max_completion_tokens", "response_format", "logprobs", "n", "background"}
        | {"conversation", "image", "moderation", "prompt", "return_token_ids", "prompt_logprobs"}
    )
    rewritten = frozenset({"input", "instructions", "tools", "tool_choice", "text"})
    ignored = frozenset({"access_programs", "context_management", "max_tool_calls", "truncation"})
    """OpenAI's limit of tool calls is of those that it makes itself."""
    kept = frozenset({"reasoning", "include", "store", "previous_response_id", "max_output_tokens", "top_logprobs"})

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.api = "responses/input_tokens" if counts else "responses"

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        include = body.get("include") or ()
        if other := {*include} - {_LOGPROBS, _ENCRYPTED}:
            raise unsupported("include", f"asks for {', '.join(sorted(other))}, which agl does not have")
        messages = [
            *_earlier(body.get("previous_response_id"), answered),
            *_read_input(body["input"], answered, ignored),
        ]
        instructions = body.get("instructions")
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
        logprobs = bool(body.get("top_logprobs")) or _LOGPROBS in include
        chat: dict[str, Json] = {
            "messages": [*system, *messages] if messages else [],
            "tools": [_tool(tool) for tool in body.get("tools") or ()] or None,
            "tool_choice": _tool_choice(body.get("tool_choice")),
            "response_format": _response_format(text.get("format") or {}),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": reasoning.get("effort"),
            "logprobs": True if logprobs else None,
            "top_logprobs": body.get("top_logprobs") if logprobs else None,
        }
        return Translation(
            chat,
            1 if self.counts else body.get("max_output_tokens"),
            logprobs,
            conversation=None if body.get("store") is False else messages,
        )

    def chunk(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        if event.get("type") not in (None, "response.completed", "response.incomplete"):
            return {}
        response, numbers = event.get("response", event), itertools.count()
        # Its items are read as they come back in a later request; what hosted tools did is left out.
        messages = _read_input([item for item in response["output"] if item["type"] in _OUTPUT], Answered(), set())
        deltas = [
            {**message, "tool_calls": [{**call, "index": next(numbers)} for call in message.get("tool_calls") or ()]}
            for message in messages
        ]
        last = {
            "index": 0,
            "finish_reason": (response.get("incomplete_details") or {}).get("reason") or "",
            "token_ids": response.get("token_ids"),
        }
        choices = [*({"index": 0, "delta": delta} for delta in deltas), last]
        return {"prompt_token_ids": response.get("prompt_token_ids"), "choices": choices}

    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        if self.counts:
            return {"object": "response.input_tokens", "input_tokens": reply.usage.prompt}
        *_, last = self.renderer(request, reply.id).events(reply)
        response: Mapping[str, Json] = last["response"]
        return response

    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        return _Events(request, reply_id)


def _earlier(previous: str | None, answered: Answered) -> Sequence[Message]:
    """The conversation that `previous_response_id` continues, without its instructions."""
    if previous is None:
        return ()
    exchange = answered.of_reply(previous)
    if exchange is None or exchange.conversation is None:
        raise wrong(
            "previous_response_id",
            f"names {previous!r}, which this attempt cannot continue. {NOT_KEPT} Send the whole input instead",
            code="previous_response_not_found",
        )
    return exchange.conversation


def _tool(tool: Mapping[str, Any]) -> dict[str, Json]:
    """A tool as chat completions describe it; a hosted one as it is: the model server may have it."""
    kind = tool["type"]
    if kind not in ("function", "custom"):
        return dict(tool)
    described = {k: v for k, v in tool.items() if k != "type" and v is not None}
    if kind == "custom" and isinstance(format := described.get("format"), dict) and format.get("type") == "grammar":
        described["format"] = {"type": "grammar", "grammar": {k: v for k, v in format.items() if k != "type"}}
    return {"type": kind, kind: described}


def _tool_choice(choice: Json) -> Json:
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    return {"type": choice["type"], choice["type"]: {"name": choice["name"]}}


def _response_format(wanted: Mapping[str, Any]) -> Json:
    kind = wanted.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_schema":
        return {"type": kind, kind: {k: v for k, v in wanted.items() if k != "type" and v is not None}}
    return dict(wanted)


def _response(request: ModelRequest, reply_id: str, created: Json) -> dict[str, Any]:
    """A response that has just begun."""
    body = request.body
    reasoning = body.get("reasoning") or {}
    return {
        "id": reply_id,
        "object": "response",
        "created_at": created if type(created) in (int, float) else int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "model": request.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **{k: v for k, v in (body.get("text") or {}).items() if v is not None}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


def _ended(reply: Reply) -> dict[str, Any]:
    """The fields of a response that its end decides."""
    reason, usage = _INCOMPLETE.get(reply.choices[0].finish_reason), reply.usage
    return {
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        },
    }


def _item(request: ModelRequest, own_id: Json, block: Block, status: str) -> dict[str, Any]:
    """An output item: a block, of which each is one."""
    if block.kind == "tool_call":
        kind, (name, _) = _type_of(block), called(block.call)
        item = {"id": own_id, "type": kind, "call_id": block.call["id"], "name": name, _WRITTEN[kind][0]: block.text}
        return item if kind == "custom_tool_call" else {**item, "status": status}
    content = {"status": status, "content": [_content_part(block)]}
    if block.kind != "reasoning":
        return {"id": own_id, "type": "message", "role": "assistant", **content}
    # Clients send it back; memory has what it means.
    sealed = {"encrypted_content": own_id} if _ENCRYPTED in (request.body.get("include") or ()) else {}
    return {"id": own_id, "type": "reasoning", "summary": [], **content, **sealed}


def _type_of(block: Block) -> str:
    if block.kind == "tool_call":
        return "custom_tool_call" if block.call.get("type") == "custom" else "function_call"
    return block.kind


def _content_part(block: Block) -> dict[str, Any]:
    written, kind = _WRITTEN[block.kind]
    part: dict[str, Any] = {"type": kind, written: block.text}
    if block.kind == "content":
        part |= {"annotations": [], "logprobs": _logprobs(block.logprobs, with_bytes=True)}
    return part


def _logprobs(entries: Sequence[Mapping[str, Any]], *, with_bytes: bool = False) -> list[dict[str, Json]]:
    def read(entry: Mapping[str, Any]) -> dict[str, Json]:
        more = {"bytes": entry.get("bytes") or []} if with_bytes else {}
        return {"token": entry.get("token"), "logprob": entry.get("logprob"), **more}

    return [{**read(entry), "top_logprobs": [*map(read, entry.get("top_logprobs") or ())]} for entry in entries]


class _Events(BlockRenderer):
    """The numbered events of a stream, from `response.created` to `response.completed` or `response.incomplete`."""

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        super().__init__(logprobs=request.logprobs)
        self._request, self._reply_id = request, reply_id
        self._status, self._sent = "completed", 0
        self._response: Mapping[str, Any] = {}
        self._items: dict[int, Mapping[str, Json]] = {}
        """Those that are done."""

    def encode(self, events: Iterable[Event]) -> bytes:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._sent)]
        self._sent += len(numbered)
        return super().encode(numbered)

    def start(self, head: Mapping[str, Any]) -> Iterable[Event]:
        self._response = _response(self._request, self._reply_id, head.get("created"))
        return [{"type": f"response.{kind}", "response": self._response} for kind in ("created", "in_progress")]

    def finish(self, reply: Reply) -> Iterable[Event]:
        ended = _ended(reply)
        self._status = ended["status"]
        if {block.kind for block in self.blocks} <= {"reasoning"}:  # So that its echo is a message too.
            yield from self.add("content", "")
        yield from self.end()
        response = {**self._response, "output": [self._items[i] for i in range(len(self.blocks))], **ended}
        yield {"type": f"response.{self._status}", "response": response}

    def fail(self, error: ApiError) -> Event:
        return {"type": "error", "code": error.code, "message": error.message, "param": error.param}

    def opened(self, index: int, block: Block) -> Iterator[Event]:
        at = self._position(index, block)
        item = _item(self._request, at["item_id"], block, "in_progress")
        if block.kind != "tool_call":
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if block.kind != "tool_call":
            yield {"type": "response.content_part.added", **at, "part": _content_part(block)}

    def extended(self, index: int, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        sampled = {"logprobs": _logprobs(logprobs)} if block.kind == "content" else {}
        kind = f"response.{_WRITTEN[_type_of(block)][1]}.delta"
        yield {"type": kind, **self._position(index, block), "delta": text, **sampled}

    def closed(self, index: int, block: Block) -> Iterator[Event]:
        at, (written, kind) = self._position(index, block), _WRITTEN[_type_of(block)]
        sampled = {"logprobs": _logprobs(block.logprobs)} if block.kind == "content" else {}
        yield {"type": f"response.{kind}.done", **at, written: block.text, **sampled}
        if block.kind != "tool_call":
            yield {"type": "response.content_part.done", **at, "part": _content_part(block)}
        self._items[index] = _item(self._request, at["item_id"], block, self._status)
        yield {"type": "response.output_item.done", "output_index": index, "item": self._items[index]}

    def _position(self, index: int, block: Block) -> dict[str, Json]:
        """The fields of an event that say what it is about. An item's id names its reply."""
        prefix, unique = _PREFIXES[block.kind], self._reply_id.rpartition("_")[2]
        number = sum(_PREFIXES[earlier.kind] == prefix for earlier in self.blocks[:index])
        at: dict[str, Json] = {"item_id": f"{prefix}_{unique}_{number}", "output_index": index}
        return at if block.kind == "tool_call" else {**at, "content_index": 0}


def _read_input(items: Any, answered: Answered, ignored: set[str]) -> list[Message]:
    """The chat messages that `input` stands for; what is left out is added to `ignored`.

    The items of one reply (reasoning, text, function calls) are one chat message, however they come back: without ids,
    or with each call's output behind the call.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    reader = _Reader(answered, ignored)
    for item in items:
        reader.read(item)
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

    def read(self, item: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        match kind:
            case "message":
                self._read_message(item)
            case "function_call" | "custom_tool_call":
                own_kind, written = ("function", "arguments") if kind == "function_call" else ("custom", "input")
                tool = {"name": item["name"], written: item[written]}
                call = {"id": item["call_id"], "type": own_kind, own_kind: tool}
                self._assistant("tool_calls", item).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item["output"])
                self._messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            case "reasoning" if item.get("content"):
                reasoning = "".join(part["text"] for part in item["content"])
                message = self._assistant("reasoning_content", item)
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            case "reasoning":
                sealed = {**item, "id": item.get("encrypted_content")}  # Clients that keep nothing leave ids out.
                if not (self._refer(item) or self._refer(sealed)):  # No model here can read another server's.
                    self._ignored.add("input.reasoning")
            case "item_reference":
                if not self._refer(item):
                    problem = f"refers to {item['id']!r}, which is not kept. {NOT_KEPT} Send the item itself"
                    raise wrong("input", problem, code="item_not_found")
            case _:
                raise unsupported("input", f"has an item of type {kind!r}, which agl cannot pass on")

    def finish(self) -> list[Message]:
        return [self._finished(message) if message["role"] == "assistant" else message for message in self._messages]

    def _finished(self, message: dict[str, Any]) -> Message:
        content = message.get("content") or (None if message.get("tool_calls") else "")
        return self._answered.own({**message, "content": content})

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
        """Take a part of a kept reply, by its item's id alone; False if it is not kept."""
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
        if number:  # A text that went on: the first one refers to all of it.
            return True
        part, value = {
            "msg": ("content", own.get("content") or own.get("refusal") or ""),
            "rs": ("reasoning_content", reasoning_of(own)),
        }[matched[1]]
        if value is not None:
            self._assistant(part, item)[part] = value
        return value is not None

    def _assistant(self, part: str, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant message that an item is part of: the last one, or a new one."""
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
    """A text, or a list of parts as chat completions have them."""
    return content if isinstance(content, str) else joined_parts([_part(part) for part in content])


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part[_TEXTS[kind]]}
    if kind == "input_image" and part.get("image_url") is not None:
        image = {"url": part["image_url"], "detail": part.get("detail")}
        return {"type": "image_url", "image_url": without_none(image)}
    raise unsupported("input", f"has a part of type {kind!r}: agl can pass on text, and images by 'image_url'")
