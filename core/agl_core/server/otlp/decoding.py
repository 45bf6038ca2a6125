"""OTLP's bytes as spans."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict, ParseError  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from agl_core.capture.spans import Span
from agl_core.server.errors import ApiError
from agl_core.types import Json

MAX_BYTES = 32 << 20
"""What one export may be at most, compressed and not."""
_NANO = 1e-9
_IDS = ("traceId", "spanId", "parentSpanId")


def too_large() -> ApiError:
    return ApiError(
        413,
        f"The export is larger than {MAX_BYTES >> 20} MiB. Export smaller batches (OTEL_BSP_MAX_EXPORT_BATCH_SIZE).",
        code="export_too_large",
    )


def decode_protobuf(body: bytes) -> ExportTraceServiceRequest:
    """An export as protobuf; ApiError 400 if it is none."""
    try:
        request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ApiError(400, f"The body is not an ExportTraceServiceRequest: {error}") from error
    return request


def decode_json(body: bytes) -> ExportTraceServiceRequest:
    """An export as OTLP's JSON, whose ids are hexadecimal where protobuf's own JSON has base64; ApiError 400."""
    try:
        found = orjson.loads(body)
        for span in _json_spans(found):
            span.update({name: _base64(span[name]) for name in _IDS if name in span})
        request: ExportTraceServiceRequest = ParseDict(found, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ApiError(400, f"The body is not an ExportTraceServiceRequest in OTLP's JSON: {error}") from error
    return request


def spans_of(resource: trace_pb2.ResourceSpans) -> Iterator[Span | None]:
    """The spans of one resource; None for each whose ids are not valid."""
    for scope in resource.scope_spans:
        for span in scope.spans:
            valid = len(span.trace_id) == 16 and len(span.span_id) == 8 and any(span.trace_id) and any(span.span_id)
            yield _span(span, scope.scope.name) if valid else None


def attributes_of(found: Iterable[KeyValue]) -> dict[str, Json]:
    return {each.key: _value(each.value) for each in found}


def _span(span: trace_pb2.Span, scope: str) -> Span:
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex() if any(span.parent_span_id) else None,
        name=span.name,
        attributes=attributes_of(span.attributes),
        started=span.start_time_unix_nano * _NANO or None,
        ended=span.end_time_unix_nano * _NANO or None,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        description=span.status.message or None,
        events={event.name: attributes_of(event.attributes) for event in span.events},
        scope=scope,
    )


def _value(value: AnyValue) -> Json:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return attributes_of(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def _json_spans(found: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    for resource in found.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            for span in scope.get("spans") or ():
                yield span
                yield from span.get("links") or ()


def _base64(id: str) -> str:
    return base64.b64encode(bytes.fromhex(id)).decode()
