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
from agl_core.capture import StatusRule, begins
from agl_core.types import Identity, ToolStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.requests import Request
    from starlette.routing import Route

    from agl_core.store import Store


# The words in which frameworks without an adapter of their own tell a model that a tool failed.
STRANDS = (StatusRule("strands", ToolStatus.ERROR, begins(r"Unknown\ tool:\ \S{1,200}\Z")),)

SEMANTIC_KERNEL = (
    StatusRule(
        "semantic-kernel",
        ToolStatus.ERROR,
        begins(r"""
            An\ error\ occurred\ while\ invoking\ the\ function\ \S{1,200}:\s (?P<error> .* )
          | The\ tool\ call\ with\ name\ `[^`\n]{1,200}`\ is\ not\ part\ of\ the\ provided\ tools,
          | The\ tool\ call\ arguments\ are\ malformed\.
          | There\ are\ `\d+`\ tool\ call\ arguments\ required\ and\ only\ `\d+`\ received\.
          | (?: (?: Missing\ required | Received\ unexpected )\ argument\(s\):\ \[[^\]\n]{0,500}\]\.\ ){1,2}
            Please\ revise\ the\ arguments
        """),
    ),
)

AGNO = (StatusRule("agno", ToolStatus.ERROR, begins(r"Error\ while\ decoding\ function\ arguments:\s")),)

OTHERS = (
    StatusRule(
        "camel",
        ToolStatus.ERROR,
        begins(r"""
            Tool\ execution\ failed:\ (?: Tool\ '[^'\n]{1,200}'\ not\ found\ in\ registered\ tools
              | Error\ executing\ (?: async\ )?tool\ '[^'\n]{1,200}':\s
                (?: Execution\ of\ function\ .{1,2000}?\.\ Error:\s )? (?P<error> .* ) )
        """),
    ),
    StatusRule(
        "griptape",
        ToolStatus.ERROR,
        begins(r"Activity\ input\ JSON\ validation\ error:\s | action\ (?: path | name )\ not\ found\Z"),
    ),
    StatusRule("mirascope", ToolStatus.ERROR, begins(r"Tool\ '[^'\n]{1,200}'\ not\ found\ in\ registered\ tools\Z")),
    StatusRule(
        "vercel",
        ToolStatus.ERROR,
        begins(
            r"Model\ tried\ to\ call\ unavailable\ tool\ '[^'\n]{1,200}'\."
            r" | Invalid\ input\ for\ tool\ [^\s:]{1,200}:\s"
        ),
    ),
)
"""Rules for frameworks that need nothing switched on, or make no spans."""


@agl_core.adapter("opentelemetry.sdk.trace", status_rules=OTHERS)
def otel() -> Callable[[], Identity | None]:
    """Any agent that makes OpenTelemetry spans in this process: agent names, and tool results."""
    from agl_otel.watching import watch

    return watch()


@agl_core.hookimpl
def server_routes(store: Store, leased: Callable[[Request], Any]) -> Iterable[Route]:
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
