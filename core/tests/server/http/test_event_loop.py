"""The server on the event loop that it runs on in production."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from agl_core.server.listening import run
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.server import running_stack, until

from ..otlp_intake import exported

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist there")
def test_calls_and_spans_are_served_on_uvloop(tmp_path: Path) -> None:
    def tool(tracer: Any) -> None:
        tracer.start_span("execute_tool look_up", attributes={"gen_ai.operation.name": "execute_tool"}).end()

    async def serve() -> None:
        assert type(asyncio.get_running_loop()).__module__ == "uvloop"
        async with SqliteStore(tmp_path / "store.sqlite") as store, running_stack(store=store, otlp_port=0) as stack:
            key = await stack.lease()
            async with stack.client(key) as client:
                reply = await client.chat.completions.create(model="default", messages=HELLO)
            metadata = (("x-agl-rollout", f"{key.rollout}/0"), ("authorization", f"Bearer {stack.key(key)}"))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.server.otlp_port}") as channel:
                await TraceServiceStub(channel).Export(exported(tool), metadata=metadata)
            assert [call.id for call in await store.calls([key])] == [reply.id]
            assert [tool_result.tool for tool_result in await store.tool_results([key])] == ["look_up"]

    run(serve())


class Cycle:
    """Refers to itself: only the garbage collector removes it."""

    def __init__(self) -> None:
        self.itself = self


def test_old_garbage_goes_when_the_server_is_idle() -> None:
    async def serve() -> None:
        cycle = Cycle()
        gc.collect(1)  # What it finds is old from now on.
        assert gc.is_tracked(cycle)
        left = weakref.ref(cycle)
        del cycle
        gc.collect(1)
        assert left() is not None
        await until(lambda: left() is None)

    before = gc.get_threshold()
    run(serve())
    assert gc.get_threshold() == before
