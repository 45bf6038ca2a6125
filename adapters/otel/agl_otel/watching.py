"""Who makes a call, and what the tools did, from the spans of an agent in this process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from agl_core.capture import BoundedDict, Identity, Recording, current_attempt, guarded
from agl_core.types import ToolResult
from agl_otel.spans import Span, SpanFacts, agent_of, identity_of, outermost_execution, see, tool_result_of

_Key: TypeAlias = tuple[int, int]
_NANO = 1e-9


def plain(span: ReadableSpan) -> Span:
    """The span as it is now, running or not. ValueError without a context, which every tracer's span has."""
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
    )


@dataclass(slots=True, eq=False)
class _Node:
    """A span of this process and the one around it, which may end before it."""

    span: SdkSpan
    outer: _Node | None
    recording: Recording | None = None
    """The recording of the span's attempt."""
    same: list[tuple[int, SpanFacts]] = field(default_factory=list)
    """Spans below it that are the same run of a tool, by depth."""

    def around(self) -> list[_Node]:
        """This node and those around it, innermost first."""
        nodes, outer = [self], self.outer
        while outer is not None:
            nodes.append(outer)
            outer = outer.outer
        return nodes


class RunningSpans:
    """The spans of this process that are running, however many processors see them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: BoundedDict[_Key, _Node] = BoundedDict()

    def start(self, span: SdkSpan, outer: trace.Span) -> bool:
        """Start a span, perhaps again; True if it belongs to an attempt now."""
        active = current_attempt()
        with self._lock:
            around = self._node(outer)
            recording = active.recording if active else around.recording if around else None
            node = self._nodes.get(_key(span)) or _Node(span, around)
            node.recording = node.recording or recording
            self._nodes[_key(span)] = node
        return recording is not None

    def end(self, span: ReadableSpan) -> None:
        with self._lock:
            node = self._nodes.pop(_key(span), None)
        if node is None or node.recording is None:
            return
        seen = see(plain(span))
        if not isinstance(seen.did, ToolResult):
            return
        around = node.around()
        lineage = [seen, *(see(plain(outer.span)) for outer in around[1:])]
        outermost = around[lineage.index(outermost_execution(lineage))]
        outermost.same.append((len(around), seen))
        if outermost is node:
            spans = [span for _, span in sorted(node.same, key=lambda same: same[0])]
            node.recording.tool_result(tool_result_of(spans, agent_of(lineage)))

    def identity(self) -> Identity | None:
        """The caller of a request that is sent now."""
        with self._lock:
            node = self._node(trace.get_current_span())
        return identity_of([see(plain(outer.span)) for outer in node.around()]) if node else None

    def _node(self, span: trace.Span) -> _Node | None:
        node = self._nodes.get(_key(span))
        if node is None and isinstance(span, SdkSpan):  # it has ended, and what it started goes on
            return _Node(span, self._nodes.get((span.parent.trace_id, span.parent.span_id)) if span.parent else None)
        return node


class WatchingProcessor(SpanProcessor):
    """Reports the tool results of spans to the attempt that is running."""

    def __init__(self) -> None:
        self.running = _of_this_process()

    @guarded
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self.running.start(span, trace.get_current_span(parent_context))

    @guarded
    def on_end(self, span: ReadableSpan) -> None:
        self.running.end(span)


@functools.cache
def watch() -> Callable[[], Identity | None]:
    """Add a processor to the global tracer provider and all later ones; returns `RunningSpans.identity`."""
    processor = WatchingProcessor()
    init = TracerProvider.__init__

    @functools.wraps(init)
    def seen_init(provider: TracerProvider, *args: Any, **kwargs: Any) -> None:
        init(provider, *args, **kwargs)
        provider.add_span_processor(processor)

    TracerProvider.__init__ = seen_init  # type: ignore[method-assign, assignment]
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.add_span_processor(processor)
    return _of_this_process().identity


@functools.cache
def default_provider() -> TracerProvider:
    """The tracer provider for frameworks, which exports nothing, until the process sets one globally."""
    watch()
    provider = TracerProvider(shutdown_on_exit=False)
    tracer_of = trace.ProxyTracer._tracer.fget  # type: ignore[attr-defined]

    def tracer(proxy: trace.ProxyTracer) -> trace.Tracer:
        set_by_user: trace.Tracer = tracer_of(proxy)
        if set_by_user is not proxy._noop_tracer:
            return set_by_user
        return provider.get_tracer(proxy._instrumenting_module_name, proxy._instrumenting_library_version)

    trace.ProxyTracer._tracer = property(tracer)  # type: ignore[method-assign, assignment]
    return provider


@functools.cache
def _of_this_process() -> RunningSpans:
    return RunningSpans()


def _key(span: ReadableSpan | trace.Span) -> _Key:
    context = span.get_span_context()
    return (context.trace_id, context.span_id) if context else (0, 0)
