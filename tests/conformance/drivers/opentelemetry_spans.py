"""Agents written from scratch that make OpenTelemetry spans, with the OpenAI client instrumented by OpenLLMetry."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from agl_otel import AglSpanProcessor

from ...support.testing_aids import instrumenting
from ..driver import ATTACH, CHAT, MESSAGES, RESPONSES, Driver, Gap, Program, Question, Scenario, Setting
from .by_hand import NO_CHOICES, Loop, ModelReply, Reporter, client_of

PROCESSOR = "AglSpanProcessor()"
OTLP = "OTLP, no agl in the process"


class _Spans(Reporter):
    """Spans in the words of OpenTelemetry's GenAI conventions."""

    def __init__(self, tracer: Tracer, *, calls: bool) -> None:
        self._tracer, self._calls = tracer, calls
        """`calls`: nothing else makes spans of the calls."""

    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        return self._span("invoke_agent", **{"gen_ai.agent.name": agent})

    def step(self, agent: str) -> AbstractContextManager[Any]:
        return self._tracer.start_as_current_span("step")

    @contextlib.contextmanager
    def using(self, tool: str, arguments: Mapping[str, Any], id: str | None) -> Iterator[Callable[[str], None]]:
        attributes = {"gen_ai.tool.name": tool, "gen_ai.tool.call.arguments": json.dumps(dict(arguments))}
        with self._span("execute_tool", **attributes, **({"gen_ai.tool.call.id": id} if id else {})) as span:
            yield lambda result: span.set_attribute("gen_ai.tool.call.result", result)

    async def called(self, call: Awaitable[ModelReply]) -> ModelReply:
        if not self._calls:
            return await call
        with self._span("chat") as span:
            reply = await call
            span.set_attribute("gen_ai.response.id", reply.id)
            return reply

    def _span(self, operation: str, **attributes: str) -> AbstractContextManager[Any]:
        return self._tracer.start_as_current_span(
            operation, attributes={"gen_ai.operation.name": operation, **attributes}
        )


class OpenTelemetry(Driver):
    """Spans in this process, or sent over OTLP. Calls of Anthropic's client get a span from the loop itself."""

    name = "OpenTelemetry (agl-otel, OTLP)"
    apis = (CHAT, RESPONSES, MESSAGES)
    forms = (ATTACH, PROCESSOR, OTLP)
    gaps = (
        NO_CHOICES,
        Gap(
            "shared agent",
            "An exporter sends to one attempt: over OTLP, rollouts run in processes of their own.",
            forms=(OTLP,),
        ),
    )

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        with contextlib.nullcontext() if form == OTLP else super().attached(form), _instrumented() as self._provider:
            yield

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        provider, spans = self._provider, _Spans(self._provider.get_tracer("agent"), calls=setting.api == MESSAGES)
        if setting.form == PROCESSOR:
            provider.add_span_processor(AglSpanProcessor())
        if setting.form != OTLP:
            loop = Loop(spans, client_of(setting, setting.root, setting.api_key), setting, scenario)

            async def program(question: Question) -> None:
                await loop.run(question.text)

            return program

        async def exporting(question: Question) -> None:
            key = {"authorization": f"Bearer {question.api_key}"}
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{question.root}/v1/traces", headers=key)))
            client = client_of(setting, question.root, question.api_key)
            await Loop(spans, client, setting, scenario).run(question.text)
            assert await asyncio.to_thread(provider.force_flush)

        return exporting


@contextlib.contextmanager
def _instrumented() -> Iterator[TracerProvider]:
    """OpenAI's client makes spans for this provider."""
    provider = TracerProvider(shutdown_on_exit=False)
    with instrumenting() as instrument:
        instrument(OpenAIInstrumentor, provider)
        try:
            yield provider
        finally:
            provider.shutdown()
