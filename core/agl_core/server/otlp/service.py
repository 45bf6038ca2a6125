"""One export of spans, over whatever transport it came."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TypeAlias

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request

from agl_core.capture.spans import Span
from agl_core.server.gateway.attribution import attempt_of
from agl_core.server.keys import Keys
from agl_core.server.otlp.decoding import spans_of
from agl_core.server.otlp.intake import SpanIntake
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.server.rollouts.queue import RolloutQueue
from agl_core.server.sessions.sessions import Sessions

Sender: TypeAlias = ActiveAttempt | str
"""Whose an export is: an attempt's or a session's, or an application's, by its name."""


class TraceService:
    """Takes exports. All spans of one belong to the attempt whose key it carries, whatever attempt they name.

    With an application's key they belong to its open sessions: each to the one that has a call of the span's trace.
    Clients send the key as `OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20KEY'`.
    """

    def __init__(
        self, queue: RolloutQueue, intake: SpanIntake, *, keys: Keys, sessions: Sessions | None = None
    ) -> None:
        self._queue, self._intake, self._keys, self._sessions = queue, intake, keys, sessions

    async def check(self, request: Request) -> Sender:
        """Whose key the request carries. ApiError 401, 400 or 404."""
        if self._sessions is not None:
            if "rollout" not in request.path_params and (application := self._keys.application_of(request)) is not None:
                return application
            session = await self._sessions.of(request)
            if session is not None:
                return session
        return attempt_of(request, self._keys, self._queue)

    async def export(self, request: ExportTraceServiceRequest, sender: Sender) -> ExportTraceServiceResponse:
        """Take the spans in. What cannot be taken in is counted in the reply, with the reasons; it is not to be resent.

        StoreError if they could not be written: the export may be sent again.
        """
        spans, refused = await asyncio.to_thread(_valid, request)
        if isinstance(sender, ActiveAttempt):
            await self._take(sender, spans, refused)
            return _reply(refused)
        for trace in dict.fromkeys(each.trace for each in spans):
            of_trace = [each for each in spans if each.trace == trace]
            assert self._sessions is not None
            session = await self._sessions.open_in(sender, trace)
            if session is None:
                refused["no open session of this application has a call of their trace"] += len(of_trace)
            else:
                await self._take(session, of_trace, refused)
        return _reply(refused)

    async def _take(self, attempt: ActiveAttempt, spans: list[Span], refused: Counter[str]) -> None:
        if spans and (reason := await self._intake.take(attempt, spans)):
            refused[reason] += len(spans)


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
