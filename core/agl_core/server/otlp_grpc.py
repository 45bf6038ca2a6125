"""OTLP over gRPC, on a port of its own."""

from __future__ import annotations

import logging
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request

from agl_core.errors import ServerError, StoreError
from agl_core.server.errors import ApiError
from agl_core.server.otlp import MAX_BYTES, TraceService

logger = logging.getLogger(__name__)

_GRACEFUL = 5.0
"""Seconds that exports in flight get at the end."""
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
}


class GrpcTraces(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves `TraceService/Export`. The attempt is the one whose key the metadata carry.

    Port 0 takes a free one; `port` is the one taken, once it has started.
    """

    def __init__(self, service: TraceService, *, host: str, port: int) -> None:
        self.port = port
        self._service, self._host = service, host
        self._server: Any = None

    async def start(self) -> None:
        """Listen; ServerError if the port is taken."""
        # Without so_reuseport=0 a second server would share the port, and take half of the spans.
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_BYTES)]
        )
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self.port}")
        except RuntimeError as error:
            raise ServerError(
                f"The OTLP intake cannot listen on {host}:{self.port} ({error}). Another program, perhaps another run, "
                f"has that port: use port 0 for a free one, or stop the other program."
            ) from error
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(_GRACEFUL)

    async def Export(  # the name is the protocol's
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        metadata = ((name.encode(), value) for name, value in context.invocation_metadata())
        headers = [(name, value) if isinstance(value, bytes) else (name, value.encode()) for name, value in metadata]
        try:
            sender = await self._service.check(Request({"type": "http", "headers": headers}))
            return await self._service.export(request, sender)
        except ApiError as refused:
            code, text = _CODES.get(refused.status, grpc.StatusCode.INTERNAL), refused.message
        except StoreError as failed:
            code, text = grpc.StatusCode.UNAVAILABLE, f"The spans could not be stored: {failed}"
        except Exception:
            logger.exception("The OTLP intake failed in an export over gRPC")
            code, text = grpc.StatusCode.INTERNAL, "agl's OTLP intake failed; the server's log says why."
        await context.abort(code, text)
        raise AssertionError("abort raises")
