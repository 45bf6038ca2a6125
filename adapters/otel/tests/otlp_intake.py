"""Agents that export spans to a Lightning Server, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_core.types import AttemptKey
from agl_server.testing import LeasedAttempt, Stack

USER = {"role": "user", "content": "1 + 2?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
"""A tool, as a request offers it."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"
PATIENCE = 120.0
"""Seconds for any part of a request: 32 MiB through one event loop take long where others need the machine too."""


def agent_named(name: str) -> dict[str, Any]:
    """The attributes of an agent's span."""
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}


async def ask(client: Any, *messages: dict[str, Any], **options: Any) -> Any:
    """The message of a model's reply, to these messages or to `USER`."""
    reply = await client.chat.completions.create(model="default", messages=list(messages or [USER]), **options)
    return reply.choices[0].message


async def post(
    stack: Stack, body: bytes, kind: str = PROTOBUF, key: AttemptKey | None = None, holder: Any = None, **headers: str
) -> httpx.Response:
    """POST to the address of attempt `key`, with the agent's key of `holder`, by default the same."""
    bearer = {"authorization": f"Bearer {stack.key(holder or key or AttemptKey('nobody', 0))}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        url = f"{stack.url(key)}/traces"
        return await client.post(url, content=body, headers={"content-type": kind, **bearer, **named})


@contextlib.contextmanager
def exporting(attempt: LeasedAttempt, exporter: OTLPSpanExporter | None = None) -> Iterator[TracerProvider]:
    """A tracer provider whose spans go to the server when, and only when, it is flushed with `flush`."""
    stack, key = attempt.stack, attempt.key
    headers = {"authorization": f"Bearer {stack.key(key)}"}
    exporter = exporter or OTLPSpanExporter(f"{stack.url(key)}/traces", headers=headers, timeout=60)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    try:
        yield provider
    finally:
        provider.shutdown()


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
