"""Who calls, what the tools did, and the run's context as state, seen where the SDK has them.

When the SDK's hooks and spans report a tool, an exception has already become a text for the model. So inner functions
are wrapped (`_SEAMS`); one that another version of the SDK lacks is reported as a problem, and the rest goes on. The
conversation shows answers without a run of the tool.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from contextvars import ContextVar, Token
from importlib import import_module
from typing import Any

from agents.agent_tool_state import get_agent_tool_state_scope, peek_agent_tool_run_result
from agents.run_context import RunContextWrapper
from agents.tracing import AgentSpanData, GuardrailSpanData, Span, SpanData, TurnSpanData, get_current_span
from agents.tracing.processors import default_processor

from agl_core.capture import (
    Identity,
    IdentityScope,
    Outcome,
    current_attempt,
    enter_identity,
    failure_status,
    guarded,
    jsonable,
    record_tool_result,
    report_problem,
    watch,
    wrap_once,
)
from agl_core.capture.context import current_scope, holding
from agl_core.capture.watching import Enter
from agl_core.types import Json
from agl_core.types.forms import parse_if_json

_MAX_CONTEXT = 1 << 20
_UNTRACED = "no-op"
"""The id of all spans of a run whose tracing is disabled; they have their agents all the same."""


@dataclasses.dataclass(slots=True)
class _ToolRun:
    """A tool while it runs."""

    tool: Any
    started: float = dataclasses.field(default_factory=time.time)
    error: BaseException | None = None
    decided: Outcome | None = None
    """The status that its MCP server reports, if it reports a failure."""
    result: Any = None
    """The SDK's own record of what it returned."""


_running: ContextVar[_ToolRun | None] = ContextVar("agl_openai_agents_tool", default=None)


def attach() -> None:
    """Wrap the functions that ask models and run tools; calling it again changes nothing.

    The SDK's default processor sends traces to its vendor, whatever the endpoint. It passes over rollouts, where
    endpoint and key are agl's, and the data are the user's. A processor of the user's own is left alone.
    """
    processor: Any = default_processor()
    for event in ("on_trace_start", "on_span_end"):
        wrap_once(processor, event, _outside_rollouts)
    for module, name, enter in _SEAMS:
        try:
            watch(import_module(module), name, enter)
        except Exception as error:
            report_problem(f"Watching {module}.{name} of the OpenAI Agents SDK", error)


def _outside_rollouts(event: Callable[[Any], None]) -> Callable[[Any], None]:
    def handle(ended: Any) -> None:
        active = current_attempt()
        if active is None or active.calls is not None:
            event(ended)

    return handle


def who_calls() -> Identity | None:
    """Who makes a request that is sent now; None outside any agent."""
    span = get_current_span()
    return identity_of(span) if span else None


def identity_of(span: Span[Any]) -> Identity | None:
    """The agent, or the guardrail, that an open span belongs to."""
    for outer in _outwards(span):
        name = _speaker(outer.span_data)
        if name is not None:
            return Identity(name, _id(span), _id(outer))
    return None


def _outwards(span: Span[Any] | None) -> Iterator[Span[Any]]:
    while span is not None:
        yield span
        # The span that was current before: unlike `parent_id`, it is known for untraced spans too.
        before: Token[Span[Any] | None] | None = span._prev_span_token  # type: ignore[attr-defined]
        outer = before.old_value if before else None
        span = None if outer is Token.MISSING else outer


def _speaker(data: SpanData) -> str | None:
    if isinstance(data, TurnSpanData):
        return data.agent_name
    # Turns can be switched off. A guardrail that asks a model is another role than the agent that it guards.
    return data.name if isinstance(data, AgentSpanData | GuardrailSpanData) else None


def _id(span: Span[Any]) -> str | None:
    return span.span_id if span.span_id != _UNTRACED else None


@contextmanager
def _tool_run(*_: Any, function_tool: Any = None, context: Any = None, **__: Any) -> Iterator[_ToolRun]:
    """Around one tool: what it returned or raised."""
    run = _ToolRun(function_tool)
    try:
        with holding(_running, run):
            yield run
    except Exception as error:
        _report(run, context, error)
        raise
    _report_result(run, context)


def _note_failure(*_: Any, function_tool: Any, error: BaseException, **__: Any) -> None:
    """Called when an exception becomes a text for the model (`failure_error_function`)."""
    run = _running.get()
    if run is not None and run.tool.name == function_tool.name:  # and not one that this tool calls by itself
        run.error = error


def _note_mcp_failure(result: Any) -> None:
    """Called when a result of an MCP server loses its `isError`."""
    run = _running.get()
    if run is not None and (getattr(result, "isError", False) or getattr(result, "is_error", False)):
        run.decided = failure_status("")


@guarded
def _report_result(run: _ToolRun, context: Any) -> None:
    inner = peek_agent_tool_run_result(context.tool_call, scope_id=get_agent_tool_state_scope(context))
    if run.error is None and getattr(inner, "interruptions", None):
        return  # an agent used as a tool, waiting for an approval of what its own tool is to do
    _report(run, context, run.result.output if run.error is None else run.error)


@guarded
def _report(run: _ToolRun, context: Any, result: Any) -> None:
    call = context.tool_call
    record_tool_result(
        uuid.uuid4().hex,
        call.name,
        result,
        who_calls(),
        decided=run.decided,
        tool_call_id=call.call_id or None,
        arguments=parse_if_json(call.arguments or "{}"),
        started=run.started,
        adapter="openai-agents",
    )


def _context_carried(*args: Any, **kwargs: Any) -> AbstractContextManager[IdentityScope] | None:
    """While a function asks the model: its requests carry the fields of the run's context."""
    wrapper = next((value for value in (*args, *kwargs.values()) if isinstance(value, RunContextWrapper)), None)
    variables = _variables_of(wrapper.context) if wrapper else None
    if not variables:
        return None
    around = current_scope()
    who, steps = (around.identity, around.steps) if around else (Identity(), None)
    return closing(enter_identity(who, steps, variables))


def _variables_of(context: Any) -> Mapping[str, Json] | None:
    """The public fields of a context that has names for them: a mapping, dataclass or pydantic model."""
    fields = jsonable(context, _MAX_CONTEXT)
    if not isinstance(fields, dict):
        return None
    return {name: value for name, value in fields.items() if not name.startswith("_")}


_SEAMS: tuple[tuple[str, str, Enter], ...] = (
    ("agents.run_internal.tool_execution", "_invoke_function_tool_with_metadata", _tool_run),
    ("agents.tool", "maybe_invoke_function_tool_failure_error_function", _note_failure),
    ("agents.mcp.util", "result_structured_content", _note_mcp_failure),
    ("agents.run_internal.run_loop", "get_new_response", _context_carried),
    ("agents.run_internal.run_loop", "run_single_turn_streamed", _context_carried),
)
