"""One export of spans, over whatever transport it came."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request

from agl_core.capture.spans import Span
from agl_core.server.keys import Keys
from agl_core.server.naming import named_attempt, told_key
from agl_core.server.otlp.decoding import attributes_of, spans_of
from agl_core.server.otlp.intake import SpanIntake
from agl_core.server.queue import RolloutQueue
from agl_core.types import AttemptKey
from agl_core.wire import HEADER_ROLLOUT

RESOURCE_ROLLOUT = "agl.rollout"
"""The resource attribute that says `ROLLOUT/ATTEMPT`, where neither the path nor a header does."""
_NO_ROLLOUT = (
    f"nothing says which rollout they are of: export below the agent's own base URL, or send the header "
    f"{HEADER_ROLLOUT} or the resource attribute {RESOURCE_ROLLOUT}, each ROLLOUT/ATTEMPT"
)


class TraceService:
    """Takes exports. Which attempt spans belong to is said by the path, by a header, by the key, or by their resource.

    Clients send the key as `OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20KEY'`.
    """

    def __init__(self, queue: RolloutQueue, intake: SpanIntake, *, keys: Keys) -> None:
        self._queue, self._intake, self._keys = queue, intake, keys

    def check(self, request: Request) -> AttemptKey | None:
        """The attempt that the request names, else the one that its key is for; None if it is for every attempt.

        ApiError 401, 400 or 404.
        """
        named = named_attempt(request, self._keys, self._queue)
        return named.key if named else self._keys.holder(request, self._queue.held())

    async def export(
        self, request: ExportTraceServiceRequest, attempt: AttemptKey | None
    ) -> ExportTraceServiceResponse:
        """Take the spans in. What cannot be taken in is counted in the reply, with the reasons; it is not to be resent.

        StoreError if they could not be written: the export may be sent again.
        """
        spans, refused = await asyncio.to_thread(_by_attempt, request, attempt)
        for key, each in spans.items():
            active = self._queue.attempt(key)
            if active is None:
                refused[f"there is no attempt '{key.rollout}/{key.attempt}' on this server"] += len(each)
            elif reason := await self._intake.take(active, each):
                refused[reason] += len(each)
        return _reply(refused)


def _by_attempt(
    request: ExportTraceServiceRequest, attempt: AttemptKey | None
) -> tuple[Mapping[AttemptKey, list[Span]], Counter[str]]:
    """The spans of each attempt, and how many were refused for which reason."""
    found: dict[AttemptKey, list[Span]] = {}
    refused: Counter[str] = Counter()
    for resource in request.resource_spans:
        told = attributes_of(resource.resource.attributes).get(RESOURCE_ROLLOUT)
        key = attempt or told_key(str(told))
        for span in spans_of(resource):
            if span is None:
                refused["their trace or span id is not valid"] += 1
            elif key is None:
                refused[_NO_ROLLOUT] += 1
            else:
                found.setdefault(key, []).append(span)
    return found, refused


def _reply(refused: Counter[str]) -> ExportTraceServiceResponse:
    if not refused:
        return ExportTraceServiceResponse()
    reasons = "; ".join(f"{count} spans: {reason}" for reason, count in refused.items())
    partial = ExportTracePartialSuccess(rejected_spans=refused.total(), error_message=reasons)
    return ExportTraceServiceResponse(partial_success=partial)
