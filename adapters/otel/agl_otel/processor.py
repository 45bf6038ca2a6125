"""The span processor that a user adds; used alone, traces as data: text, and ids if a span holds the raw reply."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import Span as SdkSpan

import agl_core
from agl_core.capture import CapturedRollout, Latest, guarded, ids_of, logprobs_of
from agl_core.learning.transitions import Alone
from agl_core.types import Choice, FinishReason, Json
from agl_core.types.forms import parse_if_json
from agl_otel.plugin import otel
from agl_otel.spans import ModelCall, Span, SpanTree, see
from agl_otel.watching import WatchingProcessor, plain

_SETTINGS = {
    "gen_ai.request.model": "model",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.seed": "seed",
}


class AglSpanProcessor(WatchingProcessor, Alone):
    """Add it to the tracer provider that you already have:

        provider.add_span_processor(AglSpanProcessor())

    In a rollout it says who makes each call and what the tools did; to put that on the calls' requests, it attaches
    agl to this process. Outside any rollout, with no server and any endpoint, it keeps the latest `keep` traces that
    have LLM calls; `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        WatchingProcessor.__init__(self)
        self._traces = _Traces(keep)
        Alone.__init__(self, self._traces)
        agl_core.attach([otel])

    @guarded
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        if not self.running.start(span, trace.get_current_span(parent_context)):
            self._traces.start(plain(span))

    @guarded
    def on_end(self, span: ReadableSpan) -> None:
        self.running.end(span)
        self._traces.end(plain(span))


def _captured_of(spans: Sequence[Span]) -> CapturedRollout:
    """The spans below one root, and the root, as a rollout."""
    by_key = {(span.trace, span.id): span for span in spans}
    root = next((span for span in spans if (span.trace, span.parent or "") not in by_key), spans[0])
    tree = SpanTree(see(span) for span in spans)
    rollout = CapturedRollout(f"otel:{root.trace}:{root.id}", _value_of(root, "input"))
    calls = tree.calls()
    ids = Counter(call.response_id for call in calls)
    for call in calls:
        seen = [by_key[span.key] for span in call.spans]
        outermost = seen[0]
        rollout.call(
            call.response_id
            if call.response_id and ids[call.response_id] == 1
            else f"otel:{outermost.trace}:{outermost.id}",
            _request_of(seen),
            _choices_of(seen),
            sequence=rollout.next_sequence(),
            who=call.identity,
            started=outermost.started or 0.0,
            ended=outermost.ended or 0.0,
            prompt_ids=ids_of(_raw_reply(seen).get("prompt_token_ids")),
        )
    for report in tree.tool_results():
        rollout.recording.tool_result(report)
    rollout.finish(_value_of(root, "output"), (root.description or "error") if root.failed else None)
    return rollout


@dataclass(slots=True, eq=False)
class _OpenTrace:
    root: tuple[str, str]
    spans: list[Span] = field(default_factory=list)
    """Those that have ended."""
    has_ended: bool = False
    has_calls: bool = False


class _Traces:
    """The latest `keep` traces with LLM calls whose root has ended in this process."""

    def __init__(self, keep: int) -> None:
        self._lock = threading.Lock()
        self._running: Latest[tuple[str, str], _OpenTrace] = Latest()
        self._ended: Latest[tuple[str, str], _OpenTrace] = Latest(keep)

    def start(self, span: Span) -> None:
        """A span started; it is a root if the one around it is not running here."""
        key = span.trace, span.id
        with self._lock:
            self._running[key] = self._running.get((span.trace, span.parent or "")) or _OpenTrace(key)

    def end(self, span: Span) -> None:
        """A span ended."""
        key = span.trace, span.id
        with self._lock:
            traced = self._running.pop(key, None)
            if traced is None:
                return
            traced.spans.append(span)
            traced.has_ended |= key == traced.root
            traced.has_calls |= isinstance(see(span).did, ModelCall)
            if traced.has_ended and traced.has_calls:
                self._ended[traced.root] = traced

    def finished(self) -> list[CapturedRollout]:
        """The traces that have ended, in the order in which their roots did."""
        with self._lock:
            ended = [list(trace.spans) for trace in self._ended.values()]
        return [_captured_of(spans) for spans in ended]

    def clear(self) -> None:
        """Forget what has ended."""
        with self._lock:
            self._ended.clear()


def _request_of(spans: Sequence[Span]) -> dict[str, Json]:
    """The request body of one call, from its spans: the agent's own if OpenInference kept it."""
    settings: dict[str, Json] = {}
    for span in spans:
        raw = parse_if_json(span.attributes.get("input.value"))
        if isinstance(raw, Mapping) and isinstance(raw.get("messages"), list):
            return dict(raw)
        settings.update(_settings(span))
    messages = (list(_messages(span, "input")) for span in spans)
    return {**settings, "messages": next(filter(None, messages), [])}


def _choices_of(spans: Sequence[Span]) -> tuple[Choice, ...]:
    """The responses of one call, from its spans; with token ids if OpenInference kept the endpoint's reply."""
    if raw := _raw_reply(spans):
        # Of a stream, it keeps only some fields of the chunks, and so not all token ids.
        is_whole = raw.get("object") == "chat.completion"
        return tuple(_raw_choice(index, choice, is_whole) for index, choice in enumerate(raw["choices"]))
    messages = next(filter(None, (list(_messages(span, "output")) for span in spans)), [])
    reasons = next(filter(None, (span.attributes.get("gen_ai.response.finish_reasons") for span in spans)), ())
    reason_of = dict(enumerate(reasons))
    return tuple(
        Choice(
            index=index,
            message={name: value for name, value in message.items() if name != "finish_reason"},
            finish_reason=_finish_reason(message, message.get("finish_reason") or reason_of.get(index)),
        )
        for index, message in enumerate(messages)
    )


def _value_of(root: Span, side: str) -> Json:
    """The input or output of a trace's root, if the span has it."""
    return parse_if_json(root.attributes.get(f"{side}.value", root.attributes.get(f"traceloop.entity.{side}")))


def _raw_reply(spans: Sequence[Span]) -> Mapping[str, Any]:
    """The endpoint's own reply, or nothing; its token ids are in it if the endpoint returns them."""
    for span in spans:
        raw = parse_if_json(span.attributes.get("output.value"))
        if isinstance(raw, Mapping) and isinstance(raw.get("choices"), list):
            return raw
    return {}


def _raw_choice(index: int, choice: Mapping[str, Any], is_whole: bool) -> Choice:
    message: dict[str, Json] = {"role": "assistant", "content": None, **(choice.get("message") or {})}
    return Choice(
        index=choice.get("index", index),
        message=message,
        finish_reason=_finish_reason(message, choice.get("finish_reason")),
        response_ids=ids_of(choice.get("token_ids")) if is_whole else None,
        logprobs=logprobs_of(choice.get("logprobs")) if is_whole else None,
    )


def _settings(span: Span) -> dict[str, Json]:
    attributes = span.attributes
    settings = {ours: attributes[theirs] for theirs, ours in _SETTINGS.items() if theirs in attributes}
    if definitions := parse_if_json(attributes.get("gen_ai.tool.definitions")):
        settings["tools"] = definitions
    invocation = parse_if_json(attributes.get("llm.invocation_parameters"))
    return {**settings, **invocation} if isinstance(invocation, Mapping) else settings


def _messages(span: Span, side: str) -> Iterator[dict[str, Json]]:
    messages = parse_if_json(span.attributes.get(f"gen_ai.{side}.messages"))
    instructions = parse_if_json(span.attributes.get("gen_ai.system_instructions"))
    if side == "input" and isinstance(instructions, list):
        yield from _from_parts({"role": "system", "parts": instructions})
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping):
            yield from _from_parts(message) if isinstance(message.get("parts"), list) else [dict(message)]


def _from_parts(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """A message of the GenAI conventions; one that answers several tool calls becomes a `tool` message for each."""
    content: list[Json] = []
    fields = {name: value for name, value in message.items() if name in ("role", "name", "finish_reason")}
    tool_calls = []
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "tool_call":
            function = {"name": part.get("name"), "arguments": _as_text(part.get("arguments"))}
            tool_calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_call_response":
            response = part.get("response", part.get("result"))
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(response)}
        elif kind == "reasoning":
            fields["reasoning_content"] = part.get("content")
        else:
            content.append({"type": "text", "text": part.get("content")} if kind == "text" else dict(part))
    if content or tool_calls or message.get("role") != "tool":
        texts = [part["text"] or "" for part in content if part.get("type") == "text"]
        text = "".join(texts) or (None if tool_calls else "")
        fields["content"] = text if len(texts) == len(content) else content
        yield {**fields, "tool_calls": tool_calls} if tool_calls else fields


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _finish_reason(message: Mapping[str, Json], reason: Json) -> FinishReason:
    return FinishReason.read(reason, calls_tools=bool(message.get("tool_calls")))
