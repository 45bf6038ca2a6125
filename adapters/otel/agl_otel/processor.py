"""The span processor that a user adds; used alone, each root span with LLM calls below it is an episode."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace import Span as SdkSpan

import agl_core
from agl_core.apis.alone import LocalRollout, LocalRollouts
from agl_core.capture import BoundedDict, Identity, IdentityScope, current_identity, enter_identity, guarded
from agl_core.types import Json
from agl_core.types.forms import parse_if_json
from agl_otel.plugin import otel
from agl_otel.spans import Span
from agl_otel.watching import WatchingProcessor, plain


class AglSpanProcessor(WatchingProcessor, LocalRollouts):
    """Add it to the tracer provider that you already have:

        provider.add_span_processor(AglSpanProcessor())

    In a rollout it reports callers and tool results, and attaches agl to this process, which puts them on requests.
    Outside any rollout, with no server and any endpoint, it keeps the latest `keep` traces that have LLM calls;
    `episodes` and `transitions` give them as data.
    """

    def __init__(self, keep: int = 1000) -> None:
        WatchingProcessor.__init__(self)
        LocalRollouts.__init__(self, keep)
        self._roots: BoundedDict[tuple[str, str], tuple[LocalRollout, IdentityScope]] = BoundedDict()
        """Running spans that began a rollout: no span around them runs in this process."""
        agl_core.attach([otel])

    @guarded
    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        outer = trace.get_current_span(parent_context)
        if not self.running.start(span, outer):
            root = plain(span)
            rollout = self.begin(f"otel:{root.trace}:{root.id}")
            scope = enter_identity(current_identity() or Identity(), attempt=rollout.attempt)
            self._roots[root.trace, root.id] = rollout, scope
            self.running.start(span, outer)

    @guarded
    def on_end(self, span: ReadableSpan) -> None:
        self.running.end(span)
        root = plain(span)
        rollout, scope = self._roots.pop((root.trace, root.id), (None, None))
        if rollout is None or scope is None:
            return
        scope.close()
        if rollout.calls:
            rollout.task = replace(rollout.task, input=_value_of(root, "input"))
            rollout.finish(_value_of(root, "output"), (root.description or "error") if root.failed else None)


def _value_of(root: Span, side: str) -> Json:
    return parse_if_json(root.attributes.get(f"{side}.value", root.attributes.get(f"traceloop.entity.{side}")))
