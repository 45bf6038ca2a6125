"""Who makes a call, and what the tools of an agent did.

Haystack has one place for a tracer, which is the user's. So the function that opens a span of whatever tracer there is
(of the one that does nothing, too) is wrapped. A span is open in the task or thread of what it is about. That of a tool
has neither the id of the tool call nor the exception. So two inner functions of Haystack's agents are wrapped too: the
one that makes a message of a result, and the one that looks tools up.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from haystack.tracing.tracer import ProxyTracer

from agl_core.capture import (
    current_attempt,
    current_identity,
    enter_identity,
    guarded,
    message_status,
    report_problem,
    tool_result_report,
)
from agl_core.capture.context import holding
from agl_core.capture.wrapping import wrap_once
from agl_core.types import Identity

_AGENT, _COMPONENT, _STEP, _TOOL = (
    "haystack.agent.run",
    "haystack.component.run",
    "haystack.agent.step",
    "haystack.agent.step.tool",
)
_ENTERS = (_AGENT, _COMPONENT, _STEP)
_NAMED_BY = {_COMPONENT: "haystack.component.name", _TOOL: "haystack.tool.name"}
"""The tags with the names."""

_tool: ContextVar[str | None] = ContextVar("agl_haystack_tool", default=None)
"""The tool that this context runs, unless a component or an agent runs in it."""


def watch_spans() -> None:
    """Watch what is traced; calling it again changes nothing."""
    wrap_once(ProxyTracer, "trace", _naming)


def _naming(trace: Callable[..., AbstractContextManager[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    @contextmanager
    def tracing(self: Any, operation_name: str, tags: dict[str, Any] | None = None, **given: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            if current_attempt() is not None:
                _enter(stack, operation_name, tags or {})
            yield stack.enter_context(trace(self, operation_name, tags, **given))

    return tracing


def _enter(stack: ExitStack, operation: str, tags: Mapping[str, Any]) -> None:
    """Until the stack is closed, calls are those of what the span is about."""
    try:
        name = tags.get(_NAMED_BY.get(operation, ""))
        if operation == _TOOL:
            stack.enter_context(holding(_tool, name))
        if operation not in _ENTERS:
            return
        if operation == _AGENT:
            # An agent has no name of its own: it is known by the tool that it is, or by its place in a pipeline.
            name = _tool.get()
        span = uuid.uuid4().hex
        stack.callback(enter_identity(Identity(name, span, span)).close)
        if operation != _STEP:
            stack.enter_context(holding(_tool, None))
    except Exception as error:
        report_problem(f"Reading the span {operation} of Haystack", error)


@functools.cache
def watch_tools() -> None:
    """Watch the tools of Haystack's agents. What another version of Haystack does not have is reported as a problem."""
    # Not at the top: Haystack imports its agents later than its tracer.
    from haystack.components.agents import tool_calling

    for name, wrap in (("_finalize_tool_result", _sees_results), ("_resolve_tool_calls", _sees_unknown_tools)):
        try:
            wrap_once(tool_calling, name, wrap)
        except AttributeError as error:
            report_problem(f"Watching {name} of Haystack's agents", error)


def _sees_results(finalize: Callable[..., Any]) -> Callable[..., Any]:
    """Where a result, or the exception that a tool raised, becomes a message for the model."""

    def finalize_seen(result: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            message = finalize(result, tool_call, *args, **kwargs)
        except Exception as error:
            _report(tool_call, error)
            raise
        _report(tool_call, result if isinstance(result, Exception) else message)
        return message

    return finalize_seen


def _sees_unknown_tools(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Where a tool call of a tool that does not exist is answered."""
    from haystack.components.agents.tool_calling import ToolNotFoundException

    def resolve_seen(messages: Any, tools: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            resolved = resolve(messages, tools, *args, **kwargs)
        except ToolNotFoundException as error:
            calls = (call for message in messages for call in message.tool_calls)
            _report(next((call for call in calls if call.tool_name not in tools), None), error)
            raise
        for message in resolved[-1]:
            _report(message.tool_call_results[0].origin, message)
        return resolved

    return resolve_seen


@guarded
def _report(tool_call: Any, result: Any) -> None:
    """Report an exception, or the message with what the model reads."""
    active, decided = current_attempt(), None
    if active is None:
        return
    if not isinstance(result, Exception):
        said = result.tool_call_results[0]
        result = said.result if isinstance(said.result, str) else [each.to_dict() for each in said.result]
        decided = message_status(result, "error" if said.error else None)
    report = tool_result_report(
        uuid.uuid4().hex,
        tool_call.tool_name,
        result,
        replace(current_identity() or Identity(), span=None),
        decided=decided,
        # The Responses API has ids of its items besides.
        tool_call_id=(tool_call.extra or {}).get("call_id") or tool_call.id,
        arguments=tool_call.arguments,
        adapter="haystack",
    )
    active.recording.tool_result(report)
