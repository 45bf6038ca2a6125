"""The trace processor, one line in an agent that you have; used alone, it keeps the SDK's model calls as records."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agents.exceptions import UserError
from agents.models.chatcmpl_converter import Converter
from agents.tracing import GenerationSpanData, ResponseSpanData, Span, Trace, TracingProcessor

import agl_core
from agl_core.capture import (
    Capture,
    CapturedRollout,
    Latest,
    current_attempt,
    describe_error,
    guarded,
    ids_of,
    jsonable,
)
from agl_core.learning.transitions import Alone
from agl_core.types import Choice, FinishReason, Identity, Json, Tokens
from agl_openai_agents.plugin import openai_agents
from agl_openai_agents.runs import identity_of

_MAX_REQUEST = 1 << 24
_NO_SETTINGS = ("base_url", "extra_args", "extra_body", "extra_headers", "extra_query", "metadata")
_INCOMPLETE = {"max_output_tokens": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}


class AglProcessor(Alone, TracingProcessor):
    """Add it to the trace processors of an agent that you already have:

        agents.add_trace_processor(AglProcessor())

    In a rollout, it reports who makes each call and what the tools did. Outside any rollout, with no server and any
    endpoint, it keeps the latest `keep` traces; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._capture = Capture(keep)
        super().__init__(self._capture)
        self._open: Latest[str, tuple[CapturedRollout, BaseException | None]] = Latest()
        self._sequences: Latest[str, int] = Latest()
        agl_core.attach([openai_agents])

    @guarded
    def on_trace_start(self, trace: Trace) -> None:
        if current_attempt():
            return  # the gateway records the calls
        rollout = self._capture.start(trace.trace_id, trace.export())
        # An agent may run while another error is handled; that error is not its crash.
        self._open[trace.trace_id] = rollout, sys.exc_info()[1]

    @guarded
    def on_trace_end(self, trace: Trace) -> None:
        if trace.trace_id in self._open:
            rollout, before = self._open.pop(trace.trace_id)
            error = sys.exc_info()[1]
            rollout.finish(error=describe_error(error) if error and error is not before else None)

    @guarded
    def on_span_start(self, span: Span[Any]) -> None:
        if span.trace_id in self._open and isinstance(span.span_data, GenerationSpanData | ResponseSpanData):
            self._sequences[span.span_id] = self._open[span.trace_id][0].next_sequence()

    @guarded
    def on_span_end(self, span: Span[Any]) -> None:
        sequence = self._sequences.pop(span.span_id, None)
        if sequence is not None and span.trace_id in self._open:
            _keep_call(self._open[span.trace_id][0], span, sequence)

    def shutdown(self) -> None:
        """Do nothing: nothing has to be closed."""

    def force_flush(self) -> None:
        """Do nothing: nothing is sent anywhere."""


def _keep_call(rollout: CapturedRollout, span: Span[Any], sequence: int) -> None:
    """Keep the call of a generation or response span that has ended.

    Nothing is kept of a call that failed, or where the user keeps texts out of traces
    (`trace_include_sensitive_data=False`).
    """
    data = span.span_data
    is_responses = isinstance(data, ResponseSpanData)
    reply = _plain(data.response if is_responses else next(iter(data.output or ()), None))
    if reply:
        extra = (data.response.model_extra if is_responses else None) or {}
        rollout.call(
            span.span_id,
            _responses_request(data, reply) if is_responses else _chat_request(data),
            (_choice(reply, ids_of(extra.get("token_ids"))),),
            sequence=sequence,
            who=identity_of(span) or Identity(),
            started=_seconds(span.started_at),
            ended=_seconds(span.ended_at),
            prompt_ids=ids_of(extra.get("prompt_token_ids")),
            api="responses" if is_responses else "chat.completions",
        )


def _chat_request(data: Any) -> dict[str, Json]:
    settings = {k: v for k, v in (data.model_config or {}).items() if v is not None and k not in _NO_SETTINGS}
    return {"model": data.model, "messages": _plain(data.input or ()), **_plain(settings)}


def _responses_request(data: ResponseSpanData, reply: Mapping[str, Any]) -> dict[str, Json]:
    """The request as chat messages; as its items if the SDK cannot convert one (a hosted tool's)."""
    instructions, items = reply["instructions"], data.input or ()
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    try:
        messages = _plain(Converter.items_to_messages(items))
    except UserError:
        messages = _plain(items)
    settings = {name: reply[name] for name in ("temperature", "top_p", "tools")}
    return {
        "model": reply["model"],
        "messages": system + messages,
        "max_tokens": reply["max_output_tokens"],
        **settings,
    }


def _choice(reply: Mapping[str, Any], ids: Tokens | None) -> Choice:
    """A chat message, or a whole response as one: the SDK also keeps a streamed chat message as a response."""
    if reply.get("object") == "response":
        message = _message(reply["output"])
        cut = _INCOMPLETE.get((reply["incomplete_details"] or {}).get("reason", ""))
    else:
        message = {name: value for name, value in reply.items() if value is not None or name == "content"}
        cut = None  # the SDK does not keep it
    ended = FinishReason.TOOL_CALLS if message.get("tool_calls") else FinishReason.STOP
    return Choice(0, message, cut or ended, response_ids=ids)


def _message(items: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    calls = [
        {"id": call["call_id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in items
        if call["type"] == "function_call"
    ]
    text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    message: dict[str, Json] = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": calls} if calls else message


def _plain(value: Any) -> Any:
    return jsonable(value, limit=_MAX_REQUEST)


def _seconds(iso: str | None) -> float:
    return datetime.fromisoformat(iso).timestamp() if iso else 0.0
