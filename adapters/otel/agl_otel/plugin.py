"""What this package registers."""

from __future__ import annotations

from collections.abc import Callable

from agl_core import hookimpl
from agl_core.plugins import Register
from agl_core.types import Identity


class OtelAdapter:
    """Any agent that makes OpenTelemetry spans in this process: agent names, and tool outcomes."""

    framework = "opentelemetry.sdk.trace"

    def attach(self) -> Callable[[], Identity | None]:
        from agl_otel.processor import attach

        return attach()


@hookimpl
def register_adapters(register: Register) -> None:
    register("otel", lambda options: OtelAdapter(), doc=OtelAdapter.__doc__)
