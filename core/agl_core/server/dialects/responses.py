"""OpenAI's Responses API.

Instructions become a system message before the input; `text.format` becomes `response_format`, `reasoning.effort`
becomes `reasoning_effort`. Tools that are no functions go to the model server as they are, which may refuse them. What
would need OpenAI's own servers (stored prompts and conversations, background) is refused. Nothing here summarises
reasoning, or shortens a conversation that is too long, so what asks for that is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from starlette.responses import Response

from agl_core.server.answered import NOT_KEPT, Answered, Message
from agl_core.server.dialects import fields
from agl_core.server.dialects.dialect import Dialect, ModelRequest, Translation, event_stream, pieces, rendered
from agl_core.server.dialects.responses_input import item_id, read_input
from agl_core.server.reply import Reply, called, reasoning_of
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


class Responses(Dialect):
    """`POST /v1/responses`, and `/v1/responses/input_tokens`, which `counts`."""

    id_prefix = "resp_"
    checked: ClassVar[fields.Fields] = {
        **fields.COMMON,
        **fields.SAMPLING,
        **fields.TOOL_USE,
        "input": fields.a((str, list), "a string or a list of items"),
        "instructions": fields.TEXT,
        "max_output_tokens": fields.integer(1),
        "max_tool_calls": fields.integer(1),
        "previous_response_id": fields.TEXT,
        "store": fields.FLAG,
        "include": fields.TEXTS,
        "text": fields.OBJECT,
        "reasoning": fields.OBJECT,
        "tools": fields.TOOLS,
    }
    refused: ClassVar[fields.Refusals] = {
        **{
            name: ((), f"is no field of the Responses API; use {instead}")
            for name, instead in {
                "messages": "'input'",
                "max_tokens": "'max_output_tokens'",
                "max_completion_tokens": "'max_output_tokens'",
                "response_format": "'text': {'format': …}",
                "logprobs": f"'include': ['{_LOGPROBS}']",
                "n": "one request for each response",
            }.items()
        },
        **dict.fromkeys(
            ("background", "conversation", "image", "moderation", "prompt"),
            ((False,), "needs OpenAI's own servers. Leave it out"),
        ),
        **fields.NOT_RETURNED,
    }
    rewritten = frozenset({"input", "instructions", "tools", "tool_choice", "text"})
    ignored = frozenset({"access_programs", "context_management", "max_tool_calls", "truncation"})
    """OpenAI's limit of tool calls is of those that it makes itself."""
    kept = frozenset({"reasoning", "include", "store", "previous_response_id", "max_output_tokens", "top_logprobs"})

    def __init__(self, *, counts: bool = False) -> None:
        self.counts = counts
        self.api = "responses/input_tokens" if counts else "responses"

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        for index, entry in enumerate(body.get("include") or ()):
            if entry not in (_LOGPROBS, _ENCRYPTED):
                raise fields.unsupported(
                    f"include[{index}]", f"is {fields.shown(entry)}: agl can include {_LOGPROBS} only. Leave it out"
                )
        messages = [*_earlier(body, answered), *read_input(fields.need(body, "input"), answered, ignored)]
        if not messages:
            raise fields.wrong(
                "input", "must be a string or a list with at least one item", code="missing_required_parameter"
            )
        instructions = body.get("instructions")
        system: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
        text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
        fields.check_fields(text, {"format": fields.OBJECT, "verbosity": fields.TEXT}, "text.")
        fields.check_fields(reasoning, {"effort": fields.TEXT}, "reasoning.")
        logprobs = bool(body.get("top_logprobs")) or _LOGPROBS in (body.get("include") or ())
        tools = fields.objects(body.get("tools") or [], "tools")
        chat: dict[str, Json] = {
            "messages": [*system, *messages],
            "tools": [_tool(path, tool) for path, tool in tools] or None,
            "tool_choice": _tool_choice(body.get("tool_choice")),
            "response_format": _response_format(text.get("format")),
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

    def render(self, request: ModelRequest, reply: Reply, answered: Answered) -> Response:
        if self.counts:
            return rendered({"object": "response.input_tokens", "input_tokens": reply.usage.prompt})
        response = _response(request, reply)
        return event_stream(_stream_events(response)) if request.stream else rendered(response)


def _earlier(body: Mapping[str, Any], answered: Answered) -> Sequence[Message]:
    """The conversation that `previous_response_id` continues, without its instructions."""
    previous = body.get("previous_response_id")
    if previous is None:
        return ()
    conversation = answered.conversation(previous)
    if conversation is None:
        raise fields.wrong(
            "previous_response_id",
            f"names {previous!r}, which this attempt cannot continue. {NOT_KEPT} Send the whole input instead",
            code="previous_response_not_found",
        )
    return conversation


def _tool(path: str, tool: Mapping[str, Any]) -> dict[str, Json]:
    """A tool as chat completions describe it; a hosted one as it is: the model server may have it."""
    kind = fields.need_text(tool, "type", f"{path}.")
    if kind not in ("function", "custom"):
        return dict(tool)
    fields.need_text(tool, "name", f"{path}.")
    described = {k: v for k, v in tool.items() if k != "type" and v is not None}
    if kind == "function":
        fields.check_fields(tool, fields.FUNCTION, f"{path}.")
    elif isinstance(format := described.get("format"), dict) and format.get("type") == "grammar":
        described["format"] = {"type": "grammar", "grammar": {k: v for k, v in format.items() if k != "type"}}
    return {"type": kind, kind: described}


def _tool_choice(choice: Json) -> Json:
    if not isinstance(choice, dict):
        return choice
    kind = fields.need_text(choice, "type", "tool_choice.")
    if kind not in ("function", "custom"):
        return choice
    return {"type": kind, kind: {"name": fields.need_text(choice, "name", "tool_choice.")}}


def _response_format(wanted: Json) -> Json:
    if wanted is None or wanted.get("type") == "text":
        return None
    kind = wanted.get("type")
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise fields.wrong(
            "text.format.type", f"must be 'text', 'json_object' or 'json_schema', not {fields.shown(kind)}"
        )
    fields.need_text(wanted, "name", "text.format.")
    fields.must(isinstance(wanted.get("schema"), dict), "text.format.schema", "an object", wanted.get("schema"))
    return {"type": kind, kind: {k: v for k, v in wanted.items() if k != "type" and v is not None}}


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
    reasoning, content, calls = reasoning_of(message), message.get("content"), message.get("tool_calls") or ()
    items: list[dict[str, Json]] = []
    if reasoning:
        text = {"type": "reasoning_text", "text": reasoning}
        own_id = item_id("rs", reply.id)
        sealed = {"encrypted_content": own_id} if encrypted else {}  # Clients send it back; memory has what it means.
        items.append({"id": own_id, "type": "reasoning", "summary": [], "content": [text], "status": status, **sealed})
    if content or not calls:
        sampled = _logprobs(reply) if logprobs else []
        part = {"type": "output_text", "text": content or "", "annotations": [], "logprobs": sampled}
        items.append(
            {
                "id": item_id("msg", reply.id),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for number, call in enumerate(calls):
        is_custom = call.get("type") == "custom"
        own_id = item_id("ctc" if is_custom else "fc", reply.id, number)
        kind = "custom_tool_call" if is_custom else "function_call"
        name, passed = called(call)
        item: dict[str, Json] = {"id": own_id, "type": kind, "call_id": call.get("id") or own_id, "name": name}
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
    sampled: dict[str, Json] = {"logprobs": _of_event(part["logprobs"])} if is_output else {}
    none: dict[str, Json] = {"logprobs": []} if is_output else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": "", **none}}
    carried = sampled
    for piece in pieces(part["text"]):
        yield {"type": f"{kind}.delta", **place, "delta": piece, **carried}
        carried = none
    yield {"type": f"{kind}.done", **place, "text": part["text"], **sampled}
    yield {"type": "response.content_part.done", **place, "part": part}


def _of_event(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Log-probabilities as events have them: without bytes."""
    return [{**_brief(entry), "top_logprobs": [_brief(top) for top in entry["top_logprobs"]]} for entry in logprobs]


def _brief(logprob: Mapping[str, Json]) -> dict[str, Json]:
    return {"token": logprob["token"], "logprob": logprob["logprob"]}
