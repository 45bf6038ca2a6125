"""The OTLP protocol over gRPC, spoken by the client that the protocol's own definition generates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.trace import Tracer

from agl_core.errors import ServerError, StoreError
from agl_core.server.otlp_grpc import GrpcTraces
from agl_core.types import AttemptKey

from ..otlp_intake import IntakeStack, exported, running_intake


@pytest.fixture
async def intake(tmp_path: Path) -> AsyncIterator[IntakeStack]:
    async with running_intake(tmp_path) as running:
        yield running


@pytest.fixture
async def traces(intake: IntakeStack) -> AsyncIterator[GrpcTraces]:
    serving = GrpcTraces(intake.service, host="127.0.0.1", port=0)
    await serving.start()
    yield serving
    await serving.stop()


def tool(tracer: Tracer) -> None:
    tracer.start_span("execute_tool look_up", attributes={"gen_ai.operation.name": "execute_tool"}).end()


async def export(traces: GrpcTraces, request: Any, compression: Any = None, **metadata: str) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{traces.port}") as channel:
        stub = TraceServiceStub(channel)
        named = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return await stub.Export(request, metadata=named, compression=compression)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_an_export(compression: Any, intake: IntakeStack, traces: GrpcTraces) -> None:
    named, by_key = [await intake.stack.lease() for _ in range(2)]
    header = f"{named.rollout}/0"
    reply = await export(traces, exported(tool), compression, x_agl_rollout=header, **intake.authorization(named))
    assert not reply.HasField("partial_success")
    await export(traces, exported(tool), compression, **intake.authorization(by_key))
    assert [o.tool for o in await intake.stack.store.tool_results([named])] == ["look_up"]
    assert [o.tool for o in await intake.stack.store.tool_results([by_key])] == ["look_up"]


async def test_spans_without_a_valid_id_are_counted(intake: IntakeStack, traces: GrpcTraces) -> None:
    request = exported(tool)
    request.resource_spans[0].scope_spans[0].spans[0].span_id = b"short"
    reply = await export(traces, request, **intake.authorization(await intake.stack.lease()))
    assert reply.partial_success.rejected_spans == 1


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({}, grpc.StatusCode.UNAUTHENTICATED),
        ({"authorization": "Bearer wrong"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"x_agl_rollout": "gone/0", "authorization": None}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_refusals(metadata: dict[str, Any], code: Any, intake: IntakeStack, traces: GrpcTraces) -> None:
    if metadata.get("authorization", "") is None:
        metadata = {**metadata, **intake.authorization(AttemptKey("gone", 0))}
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await export(traces, exported(tool), **metadata)
    assert refusal.value.code() is code
    assert refusal.value.details()


async def test_a_store_that_fails_asks_for_the_export_again(
    intake: IntakeStack, traces: GrpcTraces, monkeypatch: pytest.MonkeyPatch
) -> None:
    key: AttemptKey = await intake.stack.lease()

    async def fail(*_: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(intake.stack.store, "put", fail)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await export(traces, exported(tool), x_agl_rollout=f"{key.rollout}/0", **intake.authorization(key))
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    monkeypatch.undo()


async def test_a_port_that_is_taken(intake: IntakeStack, traces: GrpcTraces) -> None:
    second = GrpcTraces(intake.service, host="127.0.0.1", port=traces.port)
    with pytest.raises(ServerError, match="cannot listen"):
        await second.start()
    await second.stop()
