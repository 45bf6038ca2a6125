"""The package's components: an adapter for all spans, one for each framework whose tracing has to be on, and routes.

A framework's adapter switches on what the framework brings itself, when the agent has imported it. No text of prompts,
arguments or results is added to spans that an exporter of the user's sees.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import agl_core
from agl_core.types import Identity
from agl_otel.words import AGNO, OTHERS, SEMANTIC_KERNEL, STRANDS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.requests import Request
    from starlette.routing import Route

    from agl_core.store.interface import Store


@agl_core.adapter("opentelemetry.sdk.trace", status_rules=OTHERS)
def otel() -> Callable[[], Identity | None]:
    """Any agent that makes OpenTelemetry spans in this process: agent names, and tool results."""
    from agl_otel.watching import watch

    return watch()


@agl_core.hookimpl
def server_routes(store: Store, leased: Callable[[Request], Any]) -> Iterable[Route]:
    """Where agents export spans, by OTLP."""
    from agl_otel.intake import SpanIntake

    return SpanIntake(store, leased).routes()


def _default_provider() -> TracerProvider:
    # Imported before our own module: it attaches the adapter above, which must not find that half imported.
    import opentelemetry.sdk.trace  # noqa: F401

    from agl_otel.watching import default_provider

    return default_provider()


@agl_core.adapter("pydantic_ai", name="pydantic-ai")
def pydantic_ai() -> None:
    """pydantic-ai: what `Agent.instrument_all` switches on."""
    from pydantic_ai import Agent
    from pydantic_ai.models.instrumented import InstrumentationSettings

    Agent.instrument_all(InstrumentationSettings(tracer_provider=_default_provider()))


@agl_core.adapter("strands", status_rules=STRANDS)
def strands() -> None:
    """Strands: its spans, which need a tracer provider."""
    _default_provider()


@agl_core.adapter("google.adk", name="google-adk")
def google_adk() -> None:
    """Google ADK: its spans, which need a tracer provider."""
    _default_provider()


# While Semantic Kernel is being imported, before the part that reads the variable.
@agl_core.adapter("semantic_kernel.utils.telemetry", name="semantic-kernel", status_rules=SEMANTIC_KERNEL)
def semantic_kernel() -> None:
    """Semantic Kernel: what its variable for diagnostics switches on."""
    os.environ.setdefault("SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS", "true")
    _default_provider()


@agl_core.adapter("agno.agent", name="agno", status_rules=AGNO)
def agno() -> None:
    """agno: its instrumentor of OpenInference, if that is installed."""
    try:
        instrumentor = importlib.import_module("openinference.instrumentation.agno").AgnoInstrumentor()
    except ModuleNotFoundError:
        return
    instrumentor.instrument(tracer_provider=_default_provider())
    # Instrumenting a second time would do nothing, and the user's own exporter would get no spans.
    instrumentor._is_instrumented_by_opentelemetry = False


@agl_core.adapter("agent_framework", name="agent-framework")
def agent_framework() -> None:
    """Microsoft Agent Framework: what `enable_instrumentation` switches on."""
    from agent_framework.observability import enable_instrumentation

    enable_instrumentation()
    _default_provider()
