"""An OTLP intake beside a Lightning Server with a real store, and agents that export to it, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette

from agl_core.learning import build_episode
from agl_core.server.otlp import SpanIntake, TraceService, traces_route
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.server import Stack, running_stack, until
from agl_core.types import AttemptKey, Ending, Episode
from agl_core.wire.headers import rollout_path
from agl_core.wire.workers import CloseRequest


@dataclass
class IntakeStack:
    """A Lightning Server, and an intake that shares its queue and store."""

    stack: Stack
    intake: SpanIntake
    service: TraceService
    base_url: str

    def authorization(self, key: AttemptKey) -> dict[str, str]:
        return {"authorization": f"Bearer {self.stack.key(key)}"}

    def url(self, key: AttemptKey | None = None) -> str:
        return f"{self.base_url}{rollout_path(*key) if key else ''}/v1/traces"

    @contextlib.contextmanager
    def exporting(self, key: AttemptKey, **headers: str) -> Iterator[TracerProvider]:
        """A tracer provider whose spans go to the intake when, and only when, it is flushed with `flush`."""
        exporter = OTLPSpanExporter(self.url(key), headers={**self.authorization(key), **headers}, timeout=60)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
        try:
            yield provider
        finally:
            provider.shutdown()

    async def close(self, key: AttemptKey) -> None:
        await self.stack.server.queue.close_attempt(key, CloseRequest(ending=Ending.FINISHED))

    async def episode(self, key: AttemptKey) -> Episode:
        """The attempt's episode, from what is in the store."""
        store = self.stack.store
        (attempt,) = (each for each in await store.attempts(key.rollout) if each.key == key)
        return build_episode(
            await store.rollout(key.rollout), attempt, await store.calls([key]), await store.tool_results([key])
        )


@contextlib.asynccontextmanager
async def running_intake(folder: Path) -> AsyncIterator[IntakeStack]:
    async with SqliteStore(folder / "store.sqlite") as store, running_stack(store=store) as stack:
        intake = SpanIntake(store)
        service = TraceService(stack.server.queue, intake, keys=stack.server.keys)
        prefix = "/rollout/{rollout}/attempt/{attempt}"
        app = Starlette(routes=[traces_route(f"{place}/v1/traces", service) for place in (prefix, "")])
        listener = socket.create_server(("127.0.0.1", 0))
        http = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        await until(lambda: http.started)
        yield IntakeStack(stack, intake, service, f"http://127.0.0.1:{listener.getsockname()[1]}")
        http.should_exit = True
        await serving


async def flush(provider: TracerProvider) -> None:
    """Export what has ended, and wait until the intake has answered."""
    assert await asyncio.to_thread(provider.force_flush)


def exported(make: Callable[[Any], None], **resource: str) -> Any:
    """The export request of the spans that `make` makes with a tracer, as the SDK encodes it."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    make(provider.get_tracer("test"))
    return encode_spans(memory.get_finished_spans())
