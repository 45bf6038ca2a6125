"""OpenAI's Responses API.

Instructions become a system message before the input; `text.format` becomes `response_format`, `reasoning.effort`
becomes `reasoning_effort`. Tools that are no functions go to the model server as they are, which may refuse them. What
would need OpenAI's own servers (stored prompts and conversations, background) is refused. Nothing here summarises
reasoning, or shortens a conversation that is too long, so what asks for that is ignored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from agl_core.apis.answered import NOT_KEPT, Answered, Message
from agl_core.apis.dialect import (
    Dialect,
    ModelRequest,
    Translation,
    event_stream,
    joined_parts,
    pieces,
    rendered,
    unsupported,
    without_none,
    wrong,
)
from agl_core.apis.reply import Reply, called, reasoning_of
from agl_core.types import FinishReason, Json

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_WRITTEN: Mapping[str, tuple[str, str]] = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""By the type of an item that calls a tool: the field with what the model wrote, and what its events are called."""
_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORTED: "max_output_tokens",
}
_NOT_YET = ("usage", "incomplete_details")
"""Fields that are null until the response has ended."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Where the parts that are text have it."""
_ITEM_ID = re.compile(r"(msg|rs|fc|ctc)_([0-9a-f]{32}|[a-z]+-[0-9a-f-]{37}\.[0-9a-f]{16})(?:_([0-9]+))?")
"""Kind, reply and number of an item; a reply of a session is named after it."""


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

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        if self.counts:
            return rendered({"object": "response.input_tokens", "input_tokens": reply.usage.prompt})
        response = _response(request, reply)
        return event_stream(_stream_events(response)) if request.stream else rendered(response)


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


def _response(request: ModelRequest, reply: Reply) -> dict[str, Json]:
    body, created = request.body, reply.completion.get("created")
    reason = _INCOMPLETE.get(reply.choices[0].finish_reason)
    reasoning = body.get("reasoning") or {}
    return {
        "id": reply.id,
        "object": "response",
        "created_at": created if type(created) in (int, float) else int(time.time()),
        "status": "incomplete" if reason else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "model": request.model,
        "output": _output(
            reply,
            logprobs=request.logprobs,
            encrypted=_ENCRYPTED in (body.get("include") or ()),
            status="incomplete" if reason else "completed",
        ),
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
        "usage": _usage(reply),
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


def _output(reply: Reply, *, logprobs: bool, encrypted: bool, status: str) -> list[dict[str, Json]]:
    """The output items. An empty reply has an empty text, so that its echo is a message too."""
    message = reply.choices[0].message
    reasoning, calls = reasoning_of(message), message.get("tool_calls") or ()
    content, refusal = message.get("content"), message.get("refusal")
    items: list[dict[str, Json]] = []
    if reasoning:
        text = {"type": "reasoning_text", "text": reasoning}
        own_id = _item_id("rs", reply.id)
        sealed = {"encrypted_content": own_id} if encrypted else {}  # Clients send it back; memory has what it means.
        items.append({"id": own_id, "type": "reasoning", "summary": [], "content": [text], "status": status, **sealed})
    parts: list[dict[str, Json]] = []
    if content or not (calls or refusal):
        sampled = _logprobs(reply) if logprobs else []
        parts.append({"type": "output_text", "text": content or "", "annotations": [], "logprobs": sampled})
    if refusal:
        parts.append({"type": "refusal", "refusal": refusal})
    if parts:
        items.append(
            {
                "id": _item_id("msg", reply.id),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": parts,
            }
        )
    for number, call in enumerate(calls):
        is_custom = call.get("type") == "custom"
        own_id = _item_id("ctc" if is_custom else "fc", reply.id, number)
        kind = "custom_tool_call" if is_custom else "function_call"
        name, passed = called(call)
        item: dict[str, Json] = {"id": own_id, "type": kind, "call_id": call["id"], "name": name}
        items.append({**item, _WRITTEN[kind][0]: passed, **({} if is_custom else {"status": status})})
    return items


def _logprobs(reply: Reply) -> list[dict[str, Json]]:
    choices: Any = reply.completion["choices"]
    entries = (choices[0]["logprobs"] or {}).get("content") or ()
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top_logprobs") or ()]}
        for entry in entries
    ]


def _logprob(entry: Mapping[str, Any]) -> dict[str, Json]:
    return {"token": entry.get("token"), "logprob": entry.get("logprob"), "bytes": entry.get("bytes") or []}


def _usage(reply: Reply) -> dict[str, Json]:
    usage = reply.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _stream_events(response: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """A finished response as the numbered events of a stream."""
    for number, event in enumerate(_events(response)):
        yield {**event, "sequence_number": number}


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    started = {**response, "status": "in_progress", "output": [], **dict.fromkeys(_NOT_YET)}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(response["output"]):
        written, kind = _WRITTEN.get(item["type"], ("", ""))
        empty: dict[str, Json] = {written: ""} if written else {"content": []}
        opened = {**item, **({"status": "in_progress"} if "status" in item else {}), **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"item_id": item["id"], "output_index": index}
        if written:
            for piece in pieces(item[written]):
                yield {"type": f"response.{kind}.delta", **place, "delta": piece}
            yield {"type": f"response.{kind}.done", **place, written: item[written]}
        else:
            for content_index, part in enumerate(item["content"]):
                yield from _part_events({**place, "content_index": content_index}, part)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _part_events(place: Mapping[str, Json], part: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """A part of an item's content, its text in pieces; log-probabilities go with the first piece."""
    kind, is_output = f"response.{part['type']}", part["type"] == "output_text"
    written = "refusal" if part["type"] == "refusal" else "text"
    sampled: dict[str, Json] = {"logprobs": _of_event(part["logprobs"])} if is_output else {}
    none: dict[str, Json] = {"logprobs": []} if is_output else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, written: "", **none}}
    carried = sampled
    for piece in pieces(part[written]):
        yield {"type": f"{kind}.delta", **place, "delta": piece, **carried}
        carried = none
    yield {"type": f"{kind}.done", **place, written: part[written], **sampled}
    yield {"type": "response.content_part.done", **place, "part": part}


def _of_event(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Log-probabilities as events have them: without bytes."""
    return [{**_brief(entry), "top_logprobs": [_brief(top) for top in entry["top_logprobs"]]} for entry in logprobs]


def _brief(logprob: Mapping[str, Json]) -> dict[str, Json]:
    return {"token": logprob["token"], "logprob": logprob["logprob"]}


def _item_id(kind: str, reply_id: str, number: int | None = None) -> str:
    """The id of an output item, which names the reply that it is part of.

    >>> _item_id("fc", "resp_00", 1)
    'fc_00_1'
    """
    _, _, unique = reply_id.rpartition("_")
    return f"{kind}_{unique}" if number is None else f"{kind}_{unique}_{number}"


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
                self._assistant("reasoning_content", item)["reasoning_content"] = reasoning
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
        self._assistant("content", item)["content"] = content

    def _refer(self, item: Mapping[str, Any]) -> bool:
        """Take a part of a kept reply, by its item's id alone; False if it is not kept."""
        matched = _ITEM_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        exchange = self._answered.of_reply(f"resp_{matched[2]}") if matched else None
        if matched is None or exchange is None:
            return False
        own = exchange.messages[0]
        if matched[1] in ("fc", "ctc"):
            calls: Any = own.get("tool_calls") or ()
            called = calls[int(matched[3]) : int(matched[3]) + 1] if matched[3] else ()
            if called:
                self._assistant("tool_calls", item).setdefault("tool_calls", []).extend(called)
            return bool(called)
        part, value = {
            "msg": ("content", own.get("content") or own.get("refusal") or ""),
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
