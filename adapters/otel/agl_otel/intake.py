"""Routes of the Lightning Server for spans of agents elsewhere: OTLP over HTTP, as protobuf or JSON.

The spans of an attempt become tool results, and name the agents of recorded calls, in the store.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from google.protobuf.internal.decoder import _DecodeVarint  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.apis.errors import ApiError, as_answer
from agl_core.store import Store
from agl_core.types import AttemptKey, Call, Identity, Json, Source, ToolResult
from agl_core.types.forms import count_values, parse_json
from agl_otel.spans import Span, SpanFacts, SpanTree, see
from agl_server.gateway.attempts import ActiveAttempt
from agl_server.http.listening import error_response, read_body

logger = logging.getLogger(__name__)

_NANO = 1e-9
_IDS = ("traceId", "spanId", "parentSpanId")
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_MAX_SPANS, _MAX_KEPT = 10_000, 64 << 20
"""Spans of one attempt, and the bytes of its tools' arguments and results."""
_MAX_SPAN, _MAX_FIELDS = 4 << 20, 200_000
"""Bytes of one span, and fields around the spans of one export."""
_LATE = (
    "Spans came after their attempt had ended, and do not count. Exporters send in batches, every 5 seconds by "
    "default: flush before the agent returns (provider.force_flush()), or set OTEL_BSP_SCHEDULE_DELAY=100. "
    "Further ones are only counted."
)


@dataclass(slots=True, eq=False)
class _Trace:
    """The spans of one open attempt, and what was recorded because of them."""

    attempt: ActiveAttempt
    tree: SpanTree = field(default_factory=SpanTree)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tool_results: dict[str, ToolResult] = field(default_factory=dict)
    identities: dict[str, Identity] = field(default_factory=dict)
    """By response id."""
    kept: int = 0
    """Bytes of the tools' arguments and results."""
    unrecorded: list[SpanFacts] = field(default_factory=list)
    """Spans that were not recorded in full."""

    def add(self, spans: Iterable[Span]) -> tuple[list[ToolResult], dict[str, Identity]]:
        """Tool results and callers that are new or changed because of these spans."""
        changed = self.unrecorded = [*self.unrecorded, *self.tree.add(map(see, spans))]
        kept = [[span.did.arguments, span.did.result] for span in changed if isinstance(span.did, ToolResult)]
        self.kept += len(orjson.dumps(kept))
        reports = [report for report in self.tree.tool_results(changed) if self.tool_results.get(report.id) != report]
        callers = self.tree.callers(changed).items()
        return reports, {
            id: who for id, who in callers if self.identities.get(id) != who and (who.agent or who.parent_span)
        }


class SpanIntake:
    """Takes exports, and records what their spans say.

    All spans of one export belong to the attempt whose key it carries, whatever attempt they name.

    Spans come in batches, inner ones before those around them, and may come twice: the first with its ids counts, and
    spans around it only fill gaps. Headers from an adapter in the agent's process win. All methods belong to one event
    loop.
    """

    def __init__(self, store: Store, leased: Callable[[Request], ActiveAttempt]) -> None:
        self._store, self._leased = store, leased
        self._traces: dict[AttemptKey, _Trace] = {}
        self._decoding = asyncio.Lock()
        self._warned = False

    def routes(self) -> list[Route]:
        return [Route("/v1/traces", self._answer, methods=["POST"])]

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._export(request)
        except Exception as error:
            return error_response(as_answer(error, request.url.path))

    async def _export(self, request: Request) -> Response:
        """Take spans in. The reply counts refused spans, which are not to be resent, with the reasons."""
        attempt = self._leased(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (_JSON, _PROTOBUF):
            raise ApiError(415, f"Content-Type {kind!r} is not known here: send {_PROTOBUF} or {_JSON}.")
        counting = count_values if kind == _JSON else None
        body = await read_body(request, attempt=attempt.key, count_values=counting)
        async with self._decoding:  # One at a time: a span of many small values takes thirty times its bytes.
            spans, refused = await asyncio.to_thread(_decoded, body, kind)
        if spans and (reason := await self._take(attempt, spans)):
            refused[reason] += len(spans)
        reply = ExportTraceServiceResponse()
        if refused:
            reasons = "; ".join(f"{count} spans: {reason}" for reason, count in refused.items())
            partial = ExportTracePartialSuccess(rejected_spans=refused.total(), error_message=reasons)
            reply = ExportTraceServiceResponse(partial_success=partial)
        content = reply.SerializeToString() if kind == _PROTOBUF else MessageToJson(reply, indent=None)
        return Response(content, media_type=kind)

    async def _take(self, attempt: ActiveAttempt, spans: Sequence[Span]) -> str | None:
        """Record spans of an attempt; returns the reason if they were refused."""
        self._traces = {key: trace for key, trace in self._traces.items() if not trace.attempt.closed}
        if attempt.closed:
            if not self._warned:
                self._warned = True
                logger.warning(_LATE)
            return f"attempt {attempt.record.attempt} of rollout {attempt.record.rollout} is closed: they do not count"
        trace = self._traces.setdefault(attempt.key, _Trace(attempt))
        if len(trace.tree) + len(spans) > _MAX_SPANS or trace.kept > _MAX_KEPT:
            room = f"{_MAX_SPANS} spans already, or {_MAX_KEPT >> 20} MiB of tools' arguments and results"
            return f"attempt {attempt.record.attempt} of rollout {attempt.record.rollout} has {room}"
        # The attempt's end waits for what came in before it, also where the exporter hangs up.
        task = asyncio.create_task(self._record(attempt.key, trace, spans))
        attempt.committing.add(task)
        task.add_done_callback(attempt.committing.discard)
        await asyncio.shield(task)
        return None

    async def _record(self, key: AttemptKey, trace: _Trace, spans: Sequence[Span]) -> None:
        async with trace.lock:
            reports, callers = await asyncio.to_thread(trace.add, spans)
            tool_results = [replace(report, **key._asdict(), source=Source.SPAN) for report in reports]
            named = await self._named(key, callers, trace.identities)
            if tool_results or named:
                await self._store.put(*tool_results, *named)
            trace.tool_results.update({report.id: report for report in reports})
            trace.identities.update(callers)
            trace.unrecorded = []

    async def _named(self, key: AttemptKey, callers: dict[str, Identity], before: dict[str, Identity]) -> list[Call]:
        """The recorded calls to which these callers add something."""
        changed = []
        for call in await self._store.calls([key], callers) if callers else ():
            new, earlier = callers[call.id], before.get(call.id, Identity())
            agent = new.agent if call.agent in (None, earlier.agent) else call.agent
            parent = new.parent_span if call.parent_span in (None, earlier.parent_span) else call.parent_span
            if (agent, parent) != (call.agent, call.parent_span):
                changed.append(replace(call, agent=agent, parent_span=parent))
        return changed


def _decoded(body: bytes, kind: str) -> tuple[list[Span], Counter[str]]:
    """The spans of an export, and the refused ones by reason; ApiError if it is no export.

    The ids in OTLP's JSON are hexadecimal, where protobuf's own JSON has base64.
    """
    spans, refused = list[Span](), Counter[str]()
    try:
        if kind == _PROTOBUF:
            messages = []
            for message in _binary_spans(memoryview(body)):
                if len(message) > _MAX_SPAN:
                    refused[f"they are larger than {_MAX_SPAN >> 20} MiB"] += 1
                else:
                    messages.append(trace_pb2.Span.FromString(message))
        else:
            export = parse_json(body)
            for span in _json_spans(export):
                span.update({n: base64.b64encode(bytes.fromhex(span[n])).decode() for n in _IDS if n in span})
            request = ParseDict(export, ExportTraceServiceRequest(), ignore_unknown_fields=True)
            messages = [s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]
    except (DecodeError, ParseError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ApiError(400, f"The body is not an ExportTraceServiceRequest: {error}") from error
    for span in messages:
        if len(span.trace_id) == 16 and len(span.span_id) == 8 and any(span.trace_id) and any(span.span_id):
            spans.append(_span(span))
        else:
            refused["their trace or span id is not valid"] += 1
    return spans, refused


def _binary_spans(export: memoryview) -> Iterator[memoryview]:
    """The spans of an export, each still in protobuf: parsed as a whole, two bytes of it may take two hundred."""
    left = iter(range(_MAX_FIELDS))
    for resource in _messages(export, 1, left):  # The numbers are those of resource_spans, scope_spans and spans.
        for scope in _messages(resource, 2, left):
            yield from _messages(scope, 2, left)


def _messages(message: memoryview, number: int, left: Iterator[int]) -> Iterator[memoryview]:
    """The messages in the repeated field of this number; other fields are passed over."""
    position = 0
    while position < len(message):
        key, position = _DecodeVarint(message, position)
        if key & 7 == 0:
            size, (_, position) = 0, _DecodeVarint(message, position)
        elif key & 7 == 2:
            size, position = _DecodeVarint(message, position)
        else:
            size = {1: 8, 5: 4}[key & 7]
        if position + size > len(message) or next(left, None) is None:
            raise DecodeError("it is cut off, or has too many fields")
        if key == number << 3 | 2:
            yield message[position : position + size]
        position += size


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Json]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _span(span: trace_pb2.Span) -> Span:
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex() if any(span.parent_span_id) else None,
        name=span.name,
        attributes=_attributes(span.attributes),
        started=span.start_time_unix_nano * _NANO or None,
        ended=span.end_time_unix_nano * _NANO or None,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        description=span.status.message or None,
        events={event.name: _attributes(event.attributes) for event in span.events},
    )


def _value(value: AnyValue) -> Json:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def _json_spans(export: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(export, dict):
        raise ValueError("it is no object")
    for resource in export.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            for span in scope.get("spans") or ():
                yield span
                yield from span.get("links") or ()
