"""OpenTelemetry spans in agl's terms, in process or over OTLP: who made each call, and what the tools did.

Five vocabularies are read: OpenTelemetry's GenAI conventions (`gen_ai.*`), OpenInference (`openinference.*`, `llm.*`,
`tool.*`), OpenLLMetry (`traceloop.*`), whose opentelemetry-instrumentation-openai writes the first, Langfuse
(`langfuse.observation.*`), and `ai.*` of Vercel's AI SDK. Spans are joined by parentage and ids, never by time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agl_core.capture import jsonable
from agl_core.capture.status import (
    SPANS,
    Outcome,
    failure_status,
    message_status,
    message_text,
    status_of,
    unknown_status,
)
from agl_core.types import Identity, Json, ToolResult, ToolStatus
from agl_core.types.forms import parse_if_json

_MAX_LINEAGE = 100
_CALLS = frozenset({"chat", "text_completion", "generate_content", "completion", "response"})
"""Operations that are LLM calls; embeddings, for instance, are not."""
_MAX_ERROR = 2000
_TOOL = ("gen_ai.tool.name", "tool.name", "tool_call.function.name", "ai.toolCall.name", "traceloop.entity.name")
_TOOL_CALL_ID = ("gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id")
_ARGUMENTS = (
    "gen_ai.tool.call.arguments",
    "tool_call.function.arguments",
    "ai.toolCall.args",
    "gcp.vertex.agent.tool_call_args",
    "input.value",
    "traceloop.entity.input",
    "langfuse.observation.input",
)
_RESULT = (
    "gen_ai.tool.call.result",
    "ai.toolCall.result",
    "gcp.vertex.agent.tool_response",
    "output.value",
    "traceloop.entity.output",
    "langfuse.observation.output",
)
_LEFT_OUT = "<not specified>"
"""Google ADK writes this where it knows nothing."""
_UNSPECIFIC = ("_OTHER", "pydantic_ai.exceptions.ToolRetryError")
"""Types of errors of any kind: OpenTelemetry's own, and that of every tool that fails in pydantic-ai 2.68."""
_METHOD = re.compile(
    r"\.(?: _?a?execute(?:_core|_task)? | a?run(?:_async|_sync|_stream)? | a?kickoff(?:_async)? | a?forward | __call__"
    r" | a?call | a?invoke | a?stream )\Z",
    re.VERBOSE,
)
"""The method that OpenInference puts behind an agent's or a tool's name in the name of a span."""


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
    """The text of its status."""
    events: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """The attributes of its events, by name; the last of several with one name."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A span that is one LLM invocation."""

    response_id: str | None


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """A span as agl reads it: its place in the trace, the agent that it names, and what it did."""

    trace: str
    id: str
    parent: str | None
    started: float | None
    ended: float | None
    agent: str | None = None
    """The agent that it names."""
    node: str | None = None
    """Its graph node, which counts if no agent is named."""
    is_agent: bool = False
    """It invokes an agent."""
    did: ModelCall | ToolResult | None = None
    """A call, or one run of a tool, as far as this span knows it."""

    @property
    def key(self) -> tuple[str, str]:
        return self.trace, self.id


def see(span: Span) -> SpanFacts:
    """Read a span in any of the vocabularies.

    >>> attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.result": "[]"}
    >>> tool = see(Span("7" * 32, "7" * 16, None, "execute_tool search", attributes)).did
    >>> tool.tool, str(tool.status)
    ('search', 'empty')
    """
    kind = _kind(span.attributes)
    return SpanFacts(
        span.trace,
        span.id,
        span.parent,
        span.started,
        span.ended,
        agent=_agent(span, kind == "agent"),
        node=_text(span.attributes, "graph.node.name", "graph.node.id"),
        is_agent=kind == "agent",
        did=_tool(span) if kind == "tool" else _call(span.attributes) if kind == "call" else None,
    )


def _kind(attributes: Mapping[str, Json]) -> str | None:
    operation = attributes.get("gen_ai.operation.name")
    inference = str(attributes.get("openinference.span.kind") or "").upper()
    traceloop, langfuse = attributes.get("traceloop.span.kind"), attributes.get("langfuse.observation.type")
    vercel = str(attributes.get("ai.operationId") or "")
    if attributes.get("gen_ai.tool.name") == "(merged tools)":
        return None  # Google ADK has this span beside those of the tools
    if operation == "execute_tool" or inference == "TOOL" or "tool" in (traceloop, langfuse) or vercel == "ai.toolCall":
        return "tool"
    if operation in ("invoke_agent", "create_agent") or inference == "AGENT" or "agent" in (traceloop, langfuse):
        return "agent"
    is_call = operation in _CALLS or attributes.get("llm.request.type") in ("chat", "completion")
    if is_call or inference == "LLM" or langfuse == "generation" or vercel.endswith((".doGenerate", ".doStream")):
        return "call"
    return "agent" if vercel.startswith(("ai.generate", "ai.stream")) else None


def _agent(span: Span, is_agent: bool) -> str | None:
    attributes = span.attributes
    name = _text(attributes, "gen_ai.agent.name", "agent.name", "ai.telemetry.functionId")
    if name is None and is_agent and "ai.operationId" not in attributes:
        of_span = _METHOD.sub("", span.name.removeprefix("invoke_agent").removeprefix("create_agent"))
        named = _text(attributes, "graph.node.name", "graph.node.id", "traceloop.entity.name")
        name = (named or of_span).strip() or None
    return None if name == "unknown" else name  # AG2's word for an agent without a name


def _call(attributes: Mapping[str, Json]) -> ModelCall:
    response_id = _text(attributes, "gen_ai.response.id", "ai.response.id")
    if response_id is None and "output.value" in attributes:
        raw = parse_if_json(attributes["output.value"])
        raw_id = raw.get("id") if isinstance(raw, Mapping) else None
        response_id = raw_id if isinstance(raw_id, str) else None
    return ModelCall(response_id)


def _tool(span: Span) -> ToolResult:
    attributes = span.attributes
    tool_call_id = _text(attributes, *_TOOL_CALL_ID)
    result, decided = _result(span)
    failed = span.failed or "error.type" in attributes or attributes.get("gen_ai.tool.status") == "error"
    error_type = _text(_event(span, "exception"), "exception.type") or _text(attributes, "error.type")
    status, rule = _status(span, error_type) if failed else decided
    name = _text(attributes, *_TOOL) or _METHOD.sub("", span.name.removeprefix("execute_tool").strip())
    return ToolResult(
        id=f"{span.trace}:{span.id}",
        rollout="",
        attempt=0,
        tool=name.removesuffix(".__call__") or "tool",
        status=status,
        tool_call_id=None if tool_call_id == _LEFT_OUT else tool_call_id,
        arguments=jsonable(_arguments(span)),
        result=None if failed else jsonable(result),
        error=_error(span, error_type, result) if failed else None,
        span=span.id,
        parent_span=span.parent,
        started=span.started,
        ended=span.ended,
        adapter=SPANS,
        status_rule=rule,
    )


def _arguments(span: Span) -> Json:
    attribute = next((span.attributes[name] for name in _ARGUMENTS if span.attributes.get(name) is not None), None)
    arguments = parse_if_json(attribute or _event(span, "gen_ai.tool.message").get("content"))
    if not isinstance(arguments, Mapping):
        return arguments
    if not arguments and "gcp.vertex.agent.tool_call_args" in span.attributes:
        return None  # Google ADK writes this too where content is not captured
    # OpenInference writes how the tool's function was called.
    is_call = isinstance(arguments.get("kwargs"), Mapping) and not arguments.get("args")
    is_call &= arguments.keys() <= {"args", "kwargs", "sanitize_inputs_outputs"}
    return arguments["kwargs"] if is_call else arguments


def _result(span: Span) -> tuple[Json, Outcome]:
    """The tool's result, and its status if the span did not fail."""
    attribute = next((name for name in _RESULT if name in span.attributes), None)
    result = span.attributes[attribute] if attribute else _event(span, "gen_ai.choice").get("message")
    value = parse_if_json(result)
    is_left_out = attribute == "gcp.vertex.agent.tool_response" and value in ({}, {"result": _LEFT_OUT})
    if is_left_out or (attribute is None and result is None):
        return None, unknown_status()  # users may leave results out of spans for privacy: that is no empty result
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and set(part) == {"text"} for part in value):
        return message_text(value), message_status(value)  # Strands' content blocks
    return result, status_of(value)


def _status(span: Span, error_type: str | None) -> Outcome:
    """The status of a tool that failed: by the error's type if the span has it, else by how the message begins."""
    if error_type and error_type not in _UNSPECIFIC:
        return failure_status(error_type)
    return failure_status(span.description or _text(_event(span, "exception"), "exception.message") or "")


def _error(span: Span, error_type: str | None, result: Json) -> str:
    message = _text(_event(span, "exception"), "exception.message") or span.description
    message = message or (result if isinstance(result, str) else None)
    kind = (error_type or "").rpartition(".")[2]
    if not message:
        return kind or "error"
    return (message if not kind or message.startswith(kind) else f"{kind}: {message}")[:_MAX_ERROR]


def _event(span: Span, name: str) -> Mapping[str, Json]:
    return span.events.get(name, {})


def _text(attributes: Mapping[str, Json], *names: str) -> str | None:
    """The first of these attributes that is a text and not empty."""
    for name in names:
        value = attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def agent_of(lineage: Iterable[SpanFacts]) -> str | None:
    """The nearest agent in a lineage (innermost first), else the nearest graph node."""
    spans = list(lineage)
    names = (*(span.agent for span in spans), *(span.node for span in spans))
    return next(filter(None, names), None)


def identity_of(lineage: Sequence[SpanFacts]) -> Identity:
    """The caller inside these spans (innermost first), with the nearest span that is not a call as parent."""
    calls = [span for span in lineage if isinstance(span.did, ModelCall)]
    around = next((span for span in lineage if not isinstance(span.did, ModelCall)), None)
    # The outermost call's parent may not be known here (another process has it), but the call says its id.
    parent = around.id if around else calls[-1].parent if calls else None
    return Identity(agent_of(lineage), span=calls[0].id if calls else None, parent_span=parent)


def outermost_call(lineage: Iterable[SpanFacts]) -> SpanFacts:
    """The outermost of a call's span and the calls directly around it, which are the same call."""
    *_, outermost = itertools.takewhile(lambda span: isinstance(span.did, ModelCall), lineage)
    return outermost


def outermost_execution(lineage: Iterable[SpanFacts]) -> SpanFacts:
    """The outermost span of the same run of a tool: several instrumentations may each have one for it."""
    spans = iter(lineage)
    outermost = next(spans)
    for span in spans:
        if span.is_agent:
            break  # an agent that a tool runs may well run a tool of that name
        if isinstance(span.did, ToolResult):
            if not _is_same(outermost.did, span.did):
                break
            outermost = span
    return outermost


def tool_result_of(spans: Sequence[SpanFacts], agent: str | None) -> ToolResult:
    """The tool result of one run of a tool, from its spans, outermost first."""
    # Its id stays the same when spans around it come in later.
    first = min(spans, key=lambda span: span.ended or 0.0)
    seen = [span.did for span in spans if isinstance(span.did, ToolResult)]
    failed = [run for run in (seen[-1], seen[0]) if run.status in (ToolStatus.ERROR, ToolStatus.TIMEOUT)]
    counts = next((run for run in (*failed, *seen) if failed or run.result is not None), seen[0])
    merged = {
        "id": f"{first.trace}:{first.id}",
        "agent": agent,
        "status": counts.status,
        "status_rule": counts.status_rule,
        "result": counts.result,
        "error": counts.error,
        "tool_call_id": next((run.tool_call_id for run in seen if run.tool_call_id), None),
        "arguments": next((run.arguments for run in seen if run.arguments is not None), None),
    }
    return replace(seen[0], **merged)


class SpanTree:
    """The spans of one attempt or trace, added as they come in: inner spans before those around them."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], SpanFacts] = {}
        self._inner: dict[tuple[str, str], list[SpanFacts]] = {}
        """The spans directly below one, which may not be there yet."""
        self._lineages: dict[tuple[str, str], list[SpanFacts]] = {}
        """A cache, emptied when spans are added."""

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, spans: Iterable[SpanFacts]) -> list[SpanFacts]:
        """Add spans, but for known ids; returns the new spans and all below them."""
        new = []
        self._lineages.clear()
        for span in spans:
            if span.key not in self._spans:
                self._spans[span.key] = span
                self._inner.setdefault((span.trace, span.parent or ""), []).append(span)
                new.append(span)
        return self._with_inner(new)

    def _with_inner(self, spans: Iterable[SpanFacts]) -> list[SpanFacts]:
        """Spans and all below them, those that started first at the beginning."""
        inside: dict[tuple[str, str], SpanFacts] = {}
        waiting = [*spans]
        while waiting:
            span = waiting.pop()
            if span.key not in inside:
                inside[span.key] = span
                waiting += self._inner.get(span.key, ())
        return sorted(inside.values(), key=lambda span: span.started or 0.0)

    def lineage(self, span: SpanFacts) -> list[SpanFacts]:
        """The span and the known ones around it, innermost first."""
        if span.key not in self._lineages:
            lineage: dict[tuple[str, str], SpanFacts] = {}
            outer: SpanFacts | None = span
            while outer is not None and outer.key not in lineage and len(lineage) < _MAX_LINEAGE:
                lineage[outer.key] = outer
                outer = self._spans.get((outer.trace, outer.parent)) if outer.parent else None
            self._lineages[span.key] = list(lineage.values())
        return self._lineages[span.key]

    def callers(self, spans: Iterable[SpanFacts]) -> dict[str, Identity]:
        """The callers of these spans' calls, by the id of the reply."""
        callers = {}
        for seen in self._seen_together(spans, ModelCall, outermost_call):
            calls = [(span.did.response_id, span) for span in seen if isinstance(span.did, ModelCall)]
            ids = {response_id: span for response_id, span in calls if response_id is not None}
            for response_id, span in ids.items():  # Google ADK can leave a call's span open around the next call's.
                callers[response_id] = identity_of(self.lineage(span if len(ids) > 1 else seen[-1]))
        return callers

    def tool_results(self, spans: Iterable[SpanFacts]) -> list[ToolResult]:
        """These spans' tool results, in the order in which the tools started."""
        runs = self._seen_together(spans, ToolResult, outermost_execution)
        return [tool_result_of(seen, agent_of(self.lineage(seen[-1]))) for seen in runs]

    def _seen_together(
        self,
        spans: Iterable[SpanFacts],
        kind: type[ModelCall | ToolResult],
        outermost: Callable[[list[SpanFacts]], SpanFacts],
    ) -> list[list[SpanFacts]]:
        """The spans of each call or run of a tool (several instrumentations may see it), outermost first."""
        groups: dict[tuple[str, str], list[SpanFacts]] = {
            root.key: [] for span in spans if isinstance(span.did, kind) and (root := outermost(self.lineage(span)))
        }
        for span in self._with_inner(self._spans[key] for key in groups):
            if isinstance(span.did, kind) and (key := outermost(self.lineage(span)).key) in groups:
                groups[key].append(span)
        return [sorted(seen, key=lambda span: len(self.lineage(span))) for seen in groups.values()]


def _is_same(inner: ModelCall | ToolResult | None, outer: ToolResult) -> bool:
    if not isinstance(inner, ToolResult) or inner.tool != outer.tool:
        return False
    return None in (inner.tool_call_id, outer.tool_call_id) or inner.tool_call_id == outer.tool_call_id
