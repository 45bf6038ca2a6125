"""What this package registers."""

from __future__ import annotations

from collections.abc import Callable

import agl_core
from agl_core.types import Identity


@agl_core.adapter("opentelemetry.sdk.trace")
def otel() -> Callable[[], Identity | None]:
    """Any agent that makes OpenTelemetry spans in this process: agent names, and tool results."""
    from agl_otel.watching import watch

    return watch()


def attach() -> None:
    """See the spans of every tracer provider of this process, with no change to the agent; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing. It instruments no client or framework: the
    agent makes the spans.
    """
    agl_core.attach([otel])
