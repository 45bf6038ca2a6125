"""One export of spans, over whatever transport it came."""

from __future__ import annotations

import asyncio
from collections import Counter

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request

from agl_core.capture.spans.spans import Span
from agl_core.server.gateway.attribution import attempt_of
from agl_core.server.keys import Keys
from agl_core.server.otlp.decoding import spans_of
from agl_core.server.otlp.intake import SpanIntake
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.server.rollouts.queue import RolloutQueue


class TraceService:
    """Takes exports. All spans of one belong to the attempt whose key it carries, whatever attempt they name.

    Clients send the key as `OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20KEY'`.
    """

    def __init__(self, queue: RolloutQueue, intake: SpanIntake, *, keys: Keys) -> None:
        self._queue, self._intake, self._keys = queue, intake, keys

    def check(self, request: Request) -> ActiveAttempt:
        """The attempt whose key the request carries. ApiError 401, 400 or 404."""
        return attempt_of(request, self._keys, self._queue)

    async def export(self, request: ExportTraceServiceRequest, attempt: ActiveAttempt) -> ExportTraceServiceResponse:
        """Take the spans in. What cannot be taken in is counted in the reply, with the reasons; it is not to be resent.

        StoreError if they could not be written: the export may be sent again.
        """
        spans, refused = await asyncio.to_thread(_valid, request)
        if spans and (reason := await self._intake.take(attempt, spans)):
            refused[reason] += len(spans)
        return _reply(refused)


def _valid(request: ExportTraceServiceRequest) -> tuple[list[Span], Counter[str]]:
    """The spans, and how many were refused for which reason."""
    found: list[Span] = []
    refused: Counter[str] = Counter()
    for resource in request.resource_spans:
        for span in spans_of(resource):
            if span is None:
                refused["their trace or span id is not valid"] += 1
            else:
                found.append(span)
    return found, refused


def _reply(refused: Counter[str]) -> ExportTraceServiceResponse:
    if not refused:
        return ExportTraceServiceResponse()
    reasons = "; ".join(f"{count} spans: {reason}" for reason, count in refused.items())
    partial = ExportTracePartialSuccess(rejected_spans=refused.total(), error_message=reasons)
    return ExportTraceServiceResponse(partial_success=partial)
