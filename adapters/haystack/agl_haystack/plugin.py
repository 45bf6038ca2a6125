"""agl's adapter for Haystack: who makes a call. What the tools did, the conversation shows.

Haystack has one place for a tracer, which is the user's. So the function that opens a span of whatever tracer there is
(of the one that does nothing, too) is wrapped. A span is open in the task or thread of what it is about.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import agl_core
from agl_core.capture import StatusRule, begins, current_attempt, enter_identity, report_problem
from agl_core.capture.context import holding
from agl_core.capture.reports import wrap_once
from agl_core.types import Identity, ToolStatus

_RULES = (
    StatusRule(
        "haystack",
        ToolStatus.ERROR,
        begins(
            r"(?s: Failed\ to\ invoke\ Tool\ `[^`\n]{1,200}`\ with\ parameters\b (?: .*?\.\ Error:\s (?P<error>.*) )? )"
            r"| Tool\ '[^'\n]{1,200}'\ not\ found\.\ Available\ tools:"
        ),
    ),
)
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


@agl_core.adapter("haystack.tracing.tracer", name="haystack", status_rules=_RULES)
def haystack() -> None:
    """Haystack: the names of components in pipelines, and of agents that are tools."""
    from haystack.tracing.tracer import ProxyTracer

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
