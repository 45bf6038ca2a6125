"""OpenTelemetry spans in agl's terms, in process or over OTLP.

Three vocabularies are read: OpenTelemetry's GenAI conventions (`gen_ai.*`), OpenInference (`openinference.*`,
`llm.*`, `tool.*`) and OpenLLMetry (`traceloop.*`), whose opentelemetry-instrumentation-openai writes the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_core.capture.jsonable import jsonable
from agl_core.capture.status import Decided, failure_status, status_of, unknown_status
from agl_core.types import Json, ToolStatus

_CALLS = frozenset({"chat", "text_completion", "generate_content", "completion", "response"})
"""Operations that are LLM calls; embeddings, for instance, are not."""
_MAX_ERROR = 2000


@dataclass(frozen=True, slots=True)
class Span:
    """One ended (or, in process, running) span in OpenTelemetry's terms."""

    trace: str
    """32 hex digits."""
    id: str
    """16 hex digits."""
    parent: str | None
    name: str
    attributes: Mapping[str, Json]
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    failed: bool = False
    """Its status is an error."""
    description: str | None = None
    """What its status says."""
    exception: Mapping[str, Json] = field(default_factory=dict)
    """The attributes of its last `exception` event."""
    scope: str = ""
    """The instrumentation that made it."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A span that is one LLM invocation."""

    response_id: str | None
    model: str | None


@dataclass(frozen=True, slots=True)
class ToolExecution:
    """A span that is one run of a tool."""

    tool: str
    status: ToolStatus
    tool_call_id: str | None = None
    arguments: Json = None
    result: Json = None
    error: str | None = None
    rule: str | None = None
    """The rule that decided the status."""


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """What agl takes from one span: its place in the trace, the agent that it names, and what it did."""

    trace: str
    id: str
    parent: str | None
    started: float | None
    ended: float | None
    agent: str | None = None
    """The agent that this span names."""
    node: str | None = None
    """The graph node that this span is; it counts if no agent is named."""
    is_agent: bool = False
    """It is the invocation of an agent."""
    did: ModelCall | ToolExecution | None = None
    scope: str = ""
    """The instrumentation that made it."""

    @property
    def key(self) -> tuple[str, str]:
        return self.trace, self.id


def see(span: Span) -> SeenSpan:
    """Read a span in any of the three vocabularies.

    >>> attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.result": "[]"}
    >>> tool = see(Span("7" * 32, "7" * 16, None, "execute_tool search", attributes)).did
    >>> tool.tool, str(tool.status)
    ('search', 'empty')
    """
    kind = _kind(span.attributes)
    did: ModelCall | ToolExecution | None = None
    if kind == "tool":
        did = _tool(span)
    elif kind == "call":
        did = _call(span.attributes)
    return SeenSpan(
        span.trace,
        span.id,
        span.parent,
        span.started,
        span.ended,
        agent=_agent(span, kind == "agent"),
        node=_text(span.attributes, "graph.node.name", "graph.node.id"),
        is_agent=kind == "agent",
        did=did,
        scope=span.scope,
    )


def loads(value: Json) -> Json:
    """A value that an attribute may hold as JSON text; text that is not JSON stays text.

    >>> loads('{"a": 1}'), loads("a: 1")
    ({'a': 1}, 'a: 1')
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _kind(attributes: Mapping[str, Json]) -> str | None:
    operation = attributes.get("gen_ai.operation.name")
    inference = str(attributes.get("openinference.span.kind") or "").upper()
    traceloop = attributes.get("traceloop.span.kind")
    if operation == "execute_tool" or inference == "TOOL" or traceloop == "tool":
        return "tool"
    if operation in ("invoke_agent", "create_agent") or inference == "AGENT" or traceloop == "agent":
        return "agent"
    if operation in _CALLS or inference == "LLM" or attributes.get("llm.request.type") in ("chat", "completion"):
        return "call"
    return None


def _agent(span: Span, is_agent: bool) -> str | None:
    named = _text(span.attributes, "gen_ai.agent.name", "agent.name")
    if named or not is_agent:
        return named
    entity = _text(span.attributes, "traceloop.entity.name")
    return entity or span.name.removeprefix("invoke_agent").removeprefix("create_agent").strip() or None


def _call(attributes: Mapping[str, Json]) -> ModelCall:
    response_id = _text(attributes, "gen_ai.response.id")
    if response_id is None and "output.value" in attributes:
        raw = loads(attributes["output.value"])
        found = raw.get("id") if isinstance(raw, Mapping) else None
        response_id = found if isinstance(found, str) else None
    return ModelCall(response_id, _text(attributes, "gen_ai.response.model", "llm.model_name", "gen_ai.request.model"))


def _tool(span: Span) -> ToolExecution:
    attributes = span.attributes
    result = _first(attributes, "gen_ai.tool.call.result", "output.value", "traceloop.entity.output")
    arguments = _first(
        attributes,
        *("gen_ai.tool.call.arguments", "tool_call.function.arguments", "input.value", "traceloop.entity.input"),
    )
    name = _text(attributes, "gen_ai.tool.name", "tool.name", "tool_call.function.name", "traceloop.entity.name")
    error_type = _text(span.exception, "exception.type") or _text(attributes, "error.type")
    failed = span.failed or "error.type" in attributes
    status, rule = _status(span, error_type) if failed else _result_status(attributes, result)
    return ToolExecution(
        tool=name or span.name.removeprefix("execute_tool").strip() or "tool",
        status=status,
        tool_call_id=_text(attributes, "gen_ai.tool.call.id", "tool_call.id"),
        arguments=jsonable(loads(arguments)),
        result=None if failed else jsonable(result),
        error=_error(span, error_type) if failed else None,
        rule=rule,
    )


def _status(span: Span, error_type: str | None) -> Decided:
    """The status of a tool that failed: by the error's type if the span has it, else by how the message begins."""
    return failure_status((span.description if error_type in (None, "_OTHER") else error_type) or "")


def _result_status(attributes: Mapping[str, Json], result: Json) -> Decided:
    places = ("gen_ai.tool.call.result", "output.value", "traceloop.entity.output")
    if not any(name in attributes for name in places):
        return unknown_status()  # users may leave results out of spans for privacy: that is no empty result
    return status_of(loads(result))


def _error(span: Span, error_type: str | None) -> str:
    message = _text(span.exception, "exception.message") or span.description
    kind = (error_type or "").rpartition(".")[2]
    if not message:
        return kind or "error"
    return (message if not kind or message.startswith(kind) else f"{kind}: {message}")[:_MAX_ERROR]


def _first(attributes: Mapping[str, Json], *names: str) -> Any:
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def _text(attributes: Mapping[str, Json], *names: str) -> str | None:
    """The first of these attributes that is a text with something in it."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return None
