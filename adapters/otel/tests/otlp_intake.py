"""Agents that export spans to a Lightning Server, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_core.types import AttemptKey, Ending
from agl_core.wire import CloseRequest
from agl_server.testing import Stack

USER = {"role": "user", "content": "1 + 2?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
"""A tool, as a request offers it."""


def agent_named(name: str) -> dict[str, Any]:
    """The attributes of an agent's span."""
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}


async def ask(client: Any, *messages: dict[str, Any], **options: Any) -> Any:
    """The message of a model's reply, to these messages or to `USER`."""
    reply = await client.chat.completions.create(model="default", messages=list(messages or [USER]), **options)
    return reply.choices[0].message


@dataclass
class IntakeStack:
    """A Lightning Server, seen by those who export to it."""

    stack: Stack

    def authorization(self, key: AttemptKey) -> dict[str, str]:
        return {"authorization": f"Bearer {self.stack.key(key)}"}

    def url(self, key: AttemptKey | None = None) -> str:
        return f"{self.stack.url(key)}/traces"

    @contextlib.contextmanager
    def exporting(self, key: AttemptKey, **headers: str) -> Iterator[TracerProvider]:
        """A tracer provider whose spans go to the server when, and only when, it is flushed with `flush`."""
        exporter = OTLPSpanExporter(self.url(key), headers={**self.authorization(key), **headers}, timeout=60)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
        try:
            yield provider
        finally:
            provider.shutdown()

    async def close(self, key: AttemptKey) -> None:
        await self.stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))


async def flush(provider: TracerProvider) -> None:
    """Export what has ended, and wait until the server has answered."""
    assert await asyncio.to_thread(provider.force_flush)


def exported(make: Callable[[Any], None], **resource: str) -> Any:
    """The export request of the spans that `make` makes with a tracer, as the SDK encodes it."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    make(provider.get_tracer("test"))
    return encode_spans(memory.get_finished_spans())
