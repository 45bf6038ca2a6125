"""OpenAI's Responses API.

Instructions become a system message before the input; `text.format` becomes `response_format`, `reasoning.effort`
becomes `reasoning_effort`. A custom tool becomes a function with the argument `input`, a namespace its functions; calls
are turned back. Codex's default tools that only OpenAI has are left out, other hosted ones go to the model server.
Services of OpenAI's servers (stored prompts and conversations, background) are refused, wishes to shorten are ignored.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agl_core.apis.answered import NOT_KEPT, Message, ReplyCache
from agl_core.apis.dialect import Dialect, ModelRequest, Translation, unsupported, wrong
from agl_core.apis.errors import ApiError
from agl_core.apis.items import INPUT, custom_input, full_name, read_input
from agl_core.apis.reply import Reply, called
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
"""By kind of block or type of tool call: the field with the model's text, and the name of its events."""
_PREFIXES = {"reasoning": "rs", "content": "msg", "refusal": "msg", "tool_call": "fc"}
"""By kind of block: the prefix of its item's id."""
_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "temperature", "top_p", "user"
)  # fmt: skip
_CALLS = {"function": "function_call", "custom": "custom_tool_call"}
"""By type of tool: the type of its calls."""
_LEFT_OUT = frozenset({"web_search", "tool_search", "shell", "local_shell", "image_generation"})
"""Tools that Codex offers by default and works without, and that no function can carry."""
_OUTPUT = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
"""Items of a reply that are the model's own words."""


class Responses(Dialect):
    """`POST /v1/responses`, and `/v1/responses/input_tokens`, which `counts`."""

    id_prefix = "resp_"
    refused = frozenset(
        {"messages", "max_tokens", "max_completion_tokens", "response_format", "logprobs", "n", "background"}
        | {"conversation", "image", "moderation", "prompt", "return_token_ids", "prompt_logprobs"}
    )
    rewritten = frozenset({"input", "instructions", "tools", "tool_choice", "text"})
    ignored = frozenset({"access_programs", "context_management", "max_tool_calls", "truncation"})
    """OpenAI's `max_tool_calls` limits calls that OpenAI makes."""
    kept = frozenset({"reasoning", "include", "store", "previous_response_id", "max_output_tokens", "top_logprobs"})

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.api = "responses/input_tokens" if counts else "responses"

    def translate(self, body: Mapping[str, Any], answered: ReplyCache, ignored: set[str]) -> Translation:
        include = body.get("include") or ()
        if other := {*include} - {_LOGPROBS, _ENCRYPTED}:
            raise unsupported("include", f"asks for {', '.join(sorted(other))}, which agl does not have")
        tools = [*_flat(body.get("tools"))]
        ignored.update(f"tools.{tool.get('name') or tool['type']}" for tool in tools if tool["type"] in _LEFT_OUT)
        earlier = _earlier(body.get("previous_response_id"), answered)
        messages = [*earlier, *read_input(body["input"], answered, ignored)]
        instructions = body.get("instructions")
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
        logprobs = bool(body.get("top_logprobs")) or _LOGPROBS in include
        chat: dict[str, Json] = {
            "messages": [*system, *messages] if messages else [],
            "tools": [_tool(tool, ignored) for tool in tools if tool["type"] not in _LEFT_OUT] or None,
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
        # Read as items that come back in a later request, without those of hosted tools.
        messages = read_input([item for item in response["output"] if item["type"] in _OUTPUT], ReplyCache(), set())
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


def _earlier(previous: str | None, answered: ReplyCache) -> Sequence[Message]:
    """The conversation of `previous_response_id`, without its instructions."""
    if previous is None:
        return ()
    exchange = answered.of_reply(previous)
    if exchange is None or exchange.conversation is None:
        problem = f"names {previous!r}, which this attempt cannot continue. {NOT_KEPT} Send the whole input instead"
        raise wrong("previous_response_id", problem, code="previous_response_not_found")
    return exchange.conversation


def _flat(tools: Iterable[Mapping[str, Any]] | None) -> Iterator[Mapping[str, Any]]:
    """The tools; those of a namespace apart, each with its name."""
    for tool in tools or ():
        inside = tool["tools"] if tool["type"] == "namespace" else ()
        yield from ({**own, "namespace": tool["name"]} for own in inside) if inside else [tool]


def _tool(tool: Mapping[str, Any], ignored: set[str]) -> dict[str, Json]:
    """A tool for a chat completion; a hosted one unchanged, as the model server may have it."""
    if tool["type"] not in _CALLS:
        return dict(tool)
    own = {k: v for k, v in tool.items() if k not in ("type", "namespace", "format") and v is not None}
    own["name"], text, form = full_name(tool), {"type": "string"}, tool.get("format") or {}
    if form.get("type") == "grammar":  # Few servers hold a reply to one, but the model can read it.
        text["description"] = f"A text by this grammar ({form['syntax']}):\n{form['definition']}"
        ignored.add(f"tools.{own['name']}.format")
    if tool["type"] == "custom":
        own["parameters"] = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return {"type": "function", "function": own}


def _tool_choice(choice: Json) -> Json:
    is_function = isinstance(choice, dict) and choice.get("type") in _CALLS
    return {"type": "function", "function": {"name": full_name(choice)}} if is_function else choice


def _response_format(wanted: Mapping[str, Any]) -> Json:
    kind = wanted.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_schema":
        return {"type": kind, kind: {k: v for k, v in wanted.items() if k != "type" and v is not None}}
    return dict(wanted)


def _response(request: ModelRequest, reply_id: str, created: Json) -> dict[str, Any]:
    """The response of `response.created`."""
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
        "model": request.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": {"type": "text"}, **{k: v for k, v in (body.get("text") or {}).items() if v is not None}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "usage": None,
        "metadata": body.get("metadata") or {},
        **{name: body.get(name) for name in _REPEATED},
    }


def _ended(reply: Reply) -> dict[str, Any]:
    """The fields of a response that are known at its end."""
    finish, usage = reply.choices[0].finish_reason, reply.usage
    reason = "max_output_tokens" if finish.is_cut else {FinishReason.CONTENT_FILTER: "content_filter"}.get(finish)
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
        tools: Any = request.body.get("tools")
        self._tools = {full_name(tool): tool for tool in _flat(tools) if tool["type"] in _CALLS}
        self._status, self._sent = "completed", 0
        self._response: Mapping[str, Any] = {}
        self._items: dict[int, Mapping[str, Json]] = {}
        """Finished items, by block."""

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
        if {block.kind for block in self.blocks} <= {"reasoning"}:  # Its echo has to be a message.
            yield from self.add("content", "")
        yield from self.end()
        response = {**self._response, "output": [self._items[i] for i in range(len(self.blocks))], **ended}
        yield {"type": f"response.{self._status}", "response": response}

    def fail(self, error: ApiError) -> Event:
        return {"type": "error", "code": error.code, "message": error.message, "param": error.param}

    def opened(self, index: int, block: Block) -> Iterator[Event]:
        at = self._position(index, block)
        item = self._item(at["item_id"], block, "in_progress")
        item |= {} if block.kind == "tool_call" else {"content": []}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if block.kind != "tool_call":
            yield {"type": "response.content_part.added", **at, "part": _content_part(block)}

    def extended(self, index: int, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        sampled = {"logprobs": _logprobs(logprobs)} if block.kind == "content" else {}
        if (kind := self._type(block)) != "custom_tool_call":
            name = f"response.{_WRITTEN[kind][1]}.delta"
            yield {"type": name, **self._position(index, block), "delta": text, **sampled}

    def closed(self, index: int, block: Block) -> Iterator[Event]:
        at, kind, text = self._position(index, block), self._type(block), self._text(block)
        written, name = _WRITTEN[kind]
        sampled = {"logprobs": _logprobs(block.logprobs)} if block.kind == "content" else {}
        if kind == "custom_tool_call":
            yield {"type": f"response.{name}.delta", **at, "delta": text}
        yield {"type": f"response.{name}.done", **at, written: text, **sampled}
        if block.kind != "tool_call":
            yield {"type": "response.content_part.done", **at, "part": _content_part(block)}
        self._items[index] = self._item(at["item_id"], block, self._status)
        yield {"type": "response.output_item.done", "output_index": index, "item": self._items[index]}

    def _item(self, own_id: Json, block: Block, status: str) -> dict[str, Any]:
        kind = self._type(block)
        if block.kind == "tool_call":
            named = {k: v for k, v in self._tool(block).items() if k in ("name", "namespace")}
            named[_WRITTEN[kind][0]] = self._text(block)
            item = {"id": own_id, "type": kind, "call_id": block.call["id"], **named}
            return item if kind == "custom_tool_call" else {**item, "status": status}
        content = {"status": status, "content": [_content_part(block)]}
        if block.kind != "reasoning":
            return {"id": own_id, "type": "message", "role": "assistant", **content}
        # Clients send the id back; the reply is kept in memory.
        sealed = {"encrypted_content": own_id} if _ENCRYPTED in (self._request.body.get("include") or ()) else {}
        return {"id": own_id, "type": "reasoning", "summary": [], **content, **sealed}

    def _tool(self, block: Block) -> Mapping[str, Any]:
        """The tool that a call names; the model may name none of the request's."""
        name, _ = called(block.call)
        return self._tools.get(name, {"type": "function", "name": name})

    def _type(self, block: Block) -> str:
        """A block's kind, or the type of its call's item."""
        return _CALLS[self._tool(block)["type"]] if block.kind == "tool_call" else block.kind

    def _text(self, block: Block) -> str:
        """A custom tool's input is known once its arguments are whole."""
        return custom_input(block.text) if self._type(block) == "custom_tool_call" else block.text

    def _position(self, index: int, block: Block) -> dict[str, Json]:
        """An event's fields with its place. An item's id names its reply."""
        prefix, unique = _PREFIXES[block.kind], self._reply_id.rpartition("_")[2]
        number = sum(_PREFIXES[earlier.kind] == prefix for earlier in self.blocks[:index])
        at: dict[str, Json] = {"item_id": f"{prefix}_{unique}_{number}", "output_index": index}
        return at if block.kind == "tool_call" else {**at, "content_index": 0}
