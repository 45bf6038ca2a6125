"""What this package registers."""

from __future__ import annotations

from collections.abc import Callable

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter
from agl_core.types import Identity


class OtelAdapter:
    """Any agent that makes OpenTelemetry spans in this process: agent names, and tool results."""

    framework = "opentelemetry.sdk.trace"

    def attach(self) -> Callable[[], Identity | None]:
        from agl_otel.watching import watch

        return watch()


def attach() -> None:
    """See the spans of every tracer provider of this process, with no change to the agent; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing. It instruments no client or framework: the
    agent makes the spans.
    """
    agl_core.attach([OtelAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("otel", lambda options: OtelAdapter(), doc=OtelAdapter.__doc__)
