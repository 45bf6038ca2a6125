"""A plain OpenTelemetry exporter, and what its spans say of calls, agents and tools."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .scores import Response, Tool, as_json


@contextlib.contextmanager
def exported_spans() -> Iterator[Sequence[Any]]:
    """Every span that ends inside, of the instrumented OpenAI client, the framework and the agent."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ...support.testing_aids import instrumenting

    exporter = InMemorySpanExporter()
    spans: list[Any] = []
    make = TracerProvider.__init__

    def make_exporting(provider: TracerProvider, *args: Any, **options: Any) -> None:
        make(provider, *args, **options)
        provider.add_span_processor(SimpleSpanProcessor(exporter))

    TracerProvider.__init__ = make_exporting  # type: ignore[method-assign]
    try:
        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            provider.add_span_processor(SimpleSpanProcessor(exporter))
        else:
            provider = TracerProvider(shutdown_on_exit=False)
            trace.set_tracer_provider(provider)
        with instrumenting() as instrument:
            instrument(OpenAIInstrumentor, provider)
            yield spans
    finally:
        TracerProvider.__init__ = make  # type: ignore[method-assign]
        spans += exporter.get_finished_spans()
        exporter.shutdown()


def responses_of_spans(spans: Sequence[Any]) -> Iterator[Response]:
    """Each response of each call, with the agent of the nearest span that names one, and the tools that join it."""
    by_id = {span.context.span_id: span for span in spans}
    chats = [span for span in spans if _is_chat(span) and not any(map(_is_told, _around(span, by_id)))]
    used = _results_by_id(spans)
    without_id = _results_by_parent(spans, chats)
    for chat in chats:
        for message in _messages(chat, "gen_ai.output.messages"):
            calls = [part for part in message["parts"] if part["type"] == "tool_call"]
            text = "".join(part["content"] for part in message["parts"] if part["type"] == "text")
            tools = [
                Tool(call["id"], call["name"], as_json(call.get("arguments")), used[call["id"]])
                for call in calls
                if call["id"] in used
            ]
            tools += without_id.get(chat.context.span_id, ())
            ids = tuple(call["id"] for call in calls)
            yield Response(None, text, ids, _agent(chat, by_id), None, None, tuple(tools))


def _results_by_id(spans: Sequence[Any]) -> dict[str, str | None]:
    """The status of each tool call that has a result: by its span, else by a later message, which has no status."""
    found: dict[str, str | None] = {}
    for span in spans:
        for message in _messages(span, "gen_ai.input.messages"):
            found.update({part["id"]: None for part in message["parts"] if part["type"] == "tool_call_response"})
    for span in spans:
        if _is_tool(span) and (id := _get(span, "gen_ai.tool.call.id")):
            found[id] = _status(span)
    return found


def _results_by_parent(spans: Sequence[Any], chats: Sequence[Any]) -> dict[int, list[Tool]]:
    """Tools without an id, at the only call under the same parent."""
    under = defaultdict(list)
    for chat in chats:
        if chat.parent is not None:
            under[chat.parent.span_id].append(chat.context.span_id)
    found = defaultdict(list)
    for span in spans:
        if not _is_tool(span) or _get(span, "gen_ai.tool.call.id") or span.parent is None:
            continue
        calls = under.get(span.parent.span_id, ())
        if len(calls) == 1:
            arguments = as_json(json.loads(_get(span, "gen_ai.tool.call.arguments") or "null"))
            found[calls[0]].append(Tool(None, _get(span, "gen_ai.tool.name"), arguments, _status(span)))
    return found


def _is_chat(span: Any) -> bool:
    return bool(_get(span, "gen_ai.operation.name") == "chat")


def _is_told(span: Any) -> bool:
    """A framework's own span of a call, around that of its client, tells all of the call."""
    return _is_chat(span) and bool(_messages(span, "gen_ai.output.messages"))


def _is_tool(span: Any) -> bool:
    return bool(_get(span, "gen_ai.operation.name") == "execute_tool")


def _status(span: Any) -> str:
    """A span knows whether the tool raised, and which exception."""
    if span.status.is_ok and not _get(span, "error.type"):
        return "ok"
    names = [str((event.attributes or {}).get("exception.type")) for event in span.events]
    return "timeout" if any("Timeout" in name for name in [*names, str(_get(span, "error.type"))]) else "error"


def _agent(span: Any, by_id: Mapping[int, Any]) -> str | None:
    names = (_get(each, "gen_ai.agent.name") for each in (span, *_around(span, by_id)))
    return next((str(name) for name in names if name), None)


def _around(span: Any, by_id: Mapping[int, Any]) -> Iterator[Any]:
    """The spans around a span, innermost first."""
    while span is not None and span.parent is not None and (span := by_id.get(span.parent.span_id)) is not None:
        yield span


def _messages(span: Any, attribute: str) -> list[Any]:
    return list(json.loads(_get(span, attribute) or "[]"))


def _get(span: Any, attribute: str) -> Any:
    return (span.attributes or {}).get(attribute)
