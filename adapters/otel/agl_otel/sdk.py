"""Spans of OpenTelemetry's SDK as agl's plain ones."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from agl_core.capture.spans.spans import Span

_NANO = 1e-9


def plain(span: ReadableSpan) -> Span:
    """The span as it is now; it may still be running.

    ValueError if it has no context, which no span of a tracer lacks.
    """
    context = span.get_span_context()
    if context is None:
        raise ValueError(f"The span '{span.name}' has no context.")
    return Span(
        trace=format_trace_id(context.trace_id),
        id=format_span_id(context.span_id),
        parent=format_span_id(span.parent.span_id) if span.parent else None,
        name=span.name,
        attributes=dict(span.attributes or {}),
        started=span.start_time and span.start_time * _NANO,
        ended=span.end_time and span.end_time * _NANO,
        failed=span.status.status_code is StatusCode.ERROR,
        description=span.status.description,
        events={event.name: dict(event.attributes or {}) for event in span.events},
        scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
    )
